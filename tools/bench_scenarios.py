"""The measurements of bench_serve: what is sent in which order, and what is kept.

Plain data in, plain data out; text, tables and files are for others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from engine_counters import SETTLE_S, EngineWork, Meter
from exact_prompts import PromptMaker, find_units
from openai_load import Ask, BenchError, Server, Timing

Advance = Callable[[str, int], None]
"""Told what is being measured and how many requests were done."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Token counts include whatever template the server adds."""

    lengths: tuple[int, ...]
    extends: tuple[int, ...]
    prefix_tokens: int
    concurrency: tuple[int, ...]
    temperatures: tuple[float, ...]
    decode_prompt_tokens: int
    max_tokens: int
    repeats: int
    seed: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """TTFT of one kind of prompt; a value per repetition. `tokens`: fresh length, or extend ·
    work: what the engine did for it, empty if the server does not tell."""

    tokens: int
    ttft_ms: tuple[float, ...]
    prompt_tokens: tuple[int, ...]
    cached_tokens: tuple[int | None, ...]
    work: tuple[EngineWork, ...] = ()


@dataclass(frozen=True, slots=True)
class Decode:
    """Streams side by side, while all of them decode; a value per repetition.

    gap_ms: time per token of a stream · p50, p99: between events, which hold `tokens_per_event` ·
    work: of all streams from their start to their end, whose prompts were cached before; empty if
    the server does not tell.
    """

    concurrency: int
    temperature: float
    gap_ms: tuple[float, ...]
    event_p50_ms: tuple[float, ...]
    event_p99_ms: tuple[float, ...]
    tokens_per_s: tuple[float, ...]
    tokens_per_event: float
    work: tuple[EngineWork, ...] = ()


@dataclass(frozen=True, slots=True)
class Results:
    plan: Plan
    url: str
    model: str
    prompts: PromptMaker
    notes: tuple[str, ...]
    fresh: tuple[FirstToken, ...]
    extend: tuple[FirstToken, ...]
    decode: tuple[Decode, ...]


def count_requests(plan: Plan) -> int:
    decode = len(plan.temperatures) * sum(plan.concurrency)
    return plan.repeats * (len(plan.lengths) + 2 * len(plan.extends) + decode)


async def run_plan(
    server: Server,
    plan: Plan,
    rng: random.Random,
    advance: Advance,
    settle_s: float = SETTLE_S,
) -> Results:
    """All of `plan`; what the server cannot hold is left out with a note.

    `settle_s`: how long an engine that tells what it does takes to tell it.
    """
    await server.learn()
    notes = [f"the server refuses {name!r}" for name in await server.drop_unsupported()]
    prompts = await find_units(server.count_prompt_tokens, rng)
    if not prompts.is_exact:
        notes.append(
            f"prompt lengths are approximate ({prompts.tokens_per_unit:.2f} tokens a word)"
        )
    meter = Meter(server, settle_s)
    await meter.learn()
    bench = _Bench(server, plan, prompts, rng, advance, meter)
    lengths = bench.fitting(plan.lengths, 1, notes)
    extends = bench.fitting(plan.extends, plan.prefix_tokens + 1, notes)
    await bench.warm_up()
    return Results(
        plan=plan,
        url=server.url,
        model=str(server.model),
        prompts=prompts,
        notes=tuple(notes),
        fresh=tuple([await bench.fresh(length) for length in lengths]),
        extend=tuple([await bench.extend(extend) for extend in extends]),
        decode=tuple(
            [
                await bench.decode(streams, temperature)
                for temperature in plan.temperatures
                for streams in plan.concurrency
            ]
        ),
    )


class _Bench:
    def __init__(
        self,
        server: Server,
        plan: Plan,
        prompts: PromptMaker,
        rng: random.Random,
        advance: Advance,
        meter: Meter,
    ) -> None:
        self._server, self._plan, self._prompts = server, plan, prompts
        self._rng, self._advance, self._meter = rng, advance, meter

    def fitting(self, counts: tuple[int, ...], beside: int, notes: list[str]) -> list[int]:
        """Those of `counts` that fit in the server's context with `beside` other tokens."""
        limit = self._server.max_model_len
        least = self._prompts.min_tokens
        fitting = []
        for count in counts:
            if limit is not None and count + beside > limit:
                notes.append(f"left out: {count} + {beside} tokens, the server's limit is {limit}")
            elif count + beside <= least:
                notes.append(f"left out: {count} tokens, the shortest prompt has {least}")
            else:
                fitting.append(count)
        return fitting

    async def warm_up(self) -> None:
        """The first request of a process may compile or allocate."""
        tokens = max(self._plan.decode_prompt_tokens, self._prompts.min_tokens)
        await self._server.stream(self._prompts.make(tokens, self._rng), Ask(max_tokens=4))

    async def fresh(self, length: int) -> FirstToken:
        timings, work = [], []
        for _ in range(self._plan.repeats):
            prompt = self._prompts.make(length, self._rng)
            timing, cost = await self._first_token(prompt)
            timings.append(timing)
            work += cost
            self._advance(f"fresh, {length} tokens", 1)
        return _first_token(length, timings, work)

    async def extend(self, extend: int) -> FirstToken:
        timings, work = [], []
        for _ in range(self._plan.repeats):
            prefix = self._prompts.make(self._plan.prefix_tokens, self._rng)
            await self._server.stream(prefix, Ask(max_tokens=1))
            timing, cost = await self._first_token(prefix + self._prompts.more(extend, self._rng))
            timings.append(timing)
            work += cost
            self._advance(f"extend by {extend} tokens", 2)
        return _first_token(extend, timings, work)

    async def _first_token(self, prompt: str) -> tuple[Timing, list[EngineWork]]:
        await self._meter.start()
        timing = await self._server.stream(prompt, Ask(max_tokens=1))
        work = await self._meter.stop()
        return timing, [] if work is None else [work]

    async def decode(self, streams: int, temperature: float) -> Decode:
        rounds, work = [], []
        ask = Ask(max_tokens=self._plan.max_tokens, temperature=temperature)
        tokens = max(self._plan.decode_prompt_tokens, self._prompts.min_tokens)
        for _ in range(self._plan.repeats):
            made = [self._prompts.make(tokens, self._rng) for _ in range(streams)]
            if self._meter.is_available:  # so that what is counted is decoding
                await asyncio.gather(*(self._server.stream(prompt, Ask(1)) for prompt in made))
            await self._meter.start()
            timings = await asyncio.gather(*(self._server.stream(prompt, ask) for prompt in made))
            cost = await self._meter.stop()
            work += [] if cost is None else [cost]
            rounds.append(measure_decode(timings))
            self._advance(f"decode, {streams} at once", streams)
        gaps, p50s, p99s, speeds, per_event = zip(*rounds, strict=True)
        return Decode(
            streams, temperature, gaps, p50s, p99s, speeds, median(per_event), tuple(work)
        )


def measure_decode(timings: list[Timing]) -> tuple[float, float, float, float, float]:
    """(ms per token, median and 99th percentile of event gaps in ms, tokens/s, tokens per event).

    Only the time counts in which every stream decodes: from the last first token to the first end.
    """
    start_s = max(timing.events_s[0] for timing in timings)
    end_s = min(timing.events_s[-1] for timing in timings)
    gaps_ms: list[float] = []
    per_token_ms: list[float] = []
    num_tokens = 0.0
    for timing in timings:
        inside = [at_s for at_s in timing.events_s if start_s <= at_s <= end_s]
        if len(inside) < 2:
            raise BenchError(
                f"{len(timings)} streams of {timing.completion_tokens} tokens hardly overlap; "
                "raise --max-tokens (or the server's number of parallel requests)"
            )
        gaps_ms += [(after - at) * 1e3 for at, after in pairwise(inside)]
        tokens = (len(inside) - 1) * timing.tokens_per_event
        per_token_ms.append((inside[-1] - inside[0]) * 1e3 / tokens)
        num_tokens += tokens
    gaps_ms.sort()
    return (
        median(per_token_ms),
        median(gaps_ms),
        gaps_ms[min(len(gaps_ms) - 1, int(0.99 * len(gaps_ms)))],
        num_tokens / (end_s - start_s),
        median(timing.tokens_per_event for timing in timings),
    )


def _first_token(tokens: int, timings: list[Timing], work: list[EngineWork]) -> FirstToken:
    return FirstToken(
        tokens=tokens,
        ttft_ms=tuple(timing.ttft_ms for timing in timings),
        prompt_tokens=tuple(timing.prompt_tokens for timing in timings),
        cached_tokens=tuple(timing.cached_tokens for timing in timings),
        work=tuple(work),
    )
