"""The engines that bench_cpu compares, behind one interface: prompts in, times out.

`HttpEngine` is a client of a server (FreeToken, llama.cpp); `TransformersEngine` runs transformers'
generate in this process. Both decode greedily and never stop early.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bench_scenarios import measure_decode
from openai_load import Ask, BenchError, Server

TRIAL_TOKENS = 6


@dataclass(frozen=True, slots=True)
class Run:
    """One batch of prompts, started together.

    decode_tps: tokens/s of all while every row decodes, None for one token · total_tps: all output
    tokens over the time from the start to the last token.
    """

    ttft_ms: float
    decode_tps: float | None
    total_tps: float


class Engine(Protocol):
    """Something that completes prompts."""

    name: str

    async def run(self, prompts: Sequence[str], max_tokens: int) -> Run:
        """Complete all `prompts` side by side, `max_tokens` each."""


class HttpEngine:
    """A server, as a client sees it."""

    def __init__(self, name: str, server: Server) -> None:
        self.name = name
        self.server = server

    async def run(self, prompts: Sequence[str], max_tokens: int) -> Run:
        ask = Ask(max_tokens=max_tokens)
        timings = await asyncio.gather(*(self.server.stream(prompt, ask) for prompt in prompts))
        for timing in timings:
            if timing.completion_tokens != max_tokens:
                raise BenchError(
                    f"{self.name} gave {timing.completion_tokens} of {max_tokens} tokens; "
                    "it must support ignore_eos"
                )
        elapsed_s = max(t.events_s[-1] for t in timings) - min(t.sent_s for t in timings)
        return Run(
            ttft_ms=max(timing.ttft_ms for timing in timings),
            decode_tps=measure_decode(timings)[3] if max_tokens > 1 else None,
            total_tps=max_tokens * len(prompts) / elapsed_s,
        )


class TransformersEngine:
    """transformers' generate, with the fastest of `implementations` of experts for each case.

    A case is a number of rows, and whether more than one token is asked for; each implementation is
    tried once before the first run of a case.
    """

    name = "transformers"

    def __init__(self, directory: Path, *, threads: int, implementations: Sequence[str]) -> None:
        import torch
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
        from transformers.utils import logging

        logging.disable_progress_bar()  # bench_cpu has one
        torch.set_num_threads(threads)
        self.chosen: dict[str, str] = {}
        self._implementations = tuple(implementations)
        self._torch = torch
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()

    async def run(self, prompts: Sequence[str], max_tokens: int) -> Run:
        ids = [self._tokenizer.encode(prompt) for prompt in prompts]
        if len({len(row) for row in ids}) != 1:
            raise BenchError(f"prompts of {sorted({len(row) for row in ids})} tokens in one batch")
        case = f"{len(prompts)} rows, {'first token' if max_tokens == 1 else 'decode'}"
        if case not in self.chosen:
            tokens = min(max_tokens, TRIAL_TOKENS)
            speeds = {name: self._try(name, ids, tokens) for name in self._implementations}
            self.chosen[case] = max(speeds, key=lambda name: speeds[name])
        self._model.set_experts_implementation(self.chosen[case])
        return self._generate(ids, max_tokens)

    def _try(self, implementation: str, ids: list[list[int]], max_tokens: int) -> float:
        """Tokens/s of the second of two runs, or first tokens/s."""
        self._model.set_experts_implementation(implementation)
        self._generate(ids, max_tokens)
        run = self._generate(ids, max_tokens)
        return run.decode_tps if run.decode_tps is not None else 1 / run.ttft_ms

    def _generate(self, ids: list[list[int]], max_tokens: int) -> Run:
        batch = self._torch.tensor(ids)
        stamps = _Stamps()
        started_s = time.perf_counter()
        self._model.generate(
            batch,
            attention_mask=self._torch.ones_like(batch),
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            stopping_criteria=[stamps],
        )
        first_s, last_s = stamps.at_s[0], stamps.at_s[-1]
        rows = len(ids)
        return Run(
            ttft_ms=(first_s - started_s) * 1e3,
            decode_tps=rows * (max_tokens - 1) / (last_s - first_s) if max_tokens > 1 else None,
            total_tps=rows * max_tokens / (last_s - started_s),
        )


class _Stamps:
    """A stopping criterion that never stops and notes when it was asked: after each token."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.at_s.append(time.perf_counter())
        return input_ids.new_zeros(input_ids.shape[0], dtype=bool)
