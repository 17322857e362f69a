"""An OpenAI-compatible server as an httpx transport, on a clock of its own.

It caches prefixes and takes `prefill_s` for each uncached prompt token and `step_s` for each output
token, so that what a benchmark should find is known exactly.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class FakeServer(httpx.AsyncBaseTransport):
    """`tokenize` gives the number of tokens of a text; `unknown` are fields that it refuses.

    `worker_share` of the time is counted as step time in /metrics; with `tells_experts` each step
    asks for 10 experts, of which 3 miss, 7 bytes each.
    """

    prefill_s: float = 0.001
    step_s: float = 0.010
    overhead: int = 0
    word_tokens: int = 1
    letters: bool = False
    unknown: tuple[str, ...] = ()
    max_model_len: int | None = None
    llama_cpp: bool = False
    fail_with: tuple[int, str] | None = None
    break_off: bool = False
    silent_token: bool = False
    now_s: float = 100.0
    seen: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    api_keys: set[str | None] = field(default_factory=set)
    decoding: int = 0
    worker_share: float = 0.8
    steps: int = 0
    step_us: float = 0.0
    tells_experts: bool = False

    def clock(self) -> float:
        return self.now_s

    def tokenize(self, text: str) -> int:
        units = len(text) if self.letters else self.word_tokens * len(text.split())
        return units + self.overhead

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.api_keys.add(request.headers.get("authorization"))
        if request.url.path == "/v1/models":
            model = {"id": "fake", "max_model_len": self.max_model_len}
            return httpx.Response(200, json={"data": [model]}, request=request)
        if request.url.path == "/metrics":
            return httpx.Response(200, text=self._metrics(), request=request)
        body = json.loads(await request.aread())
        self.bodies.append(body)
        refused = [name for name in self.unknown if name in body]
        if refused:
            error = {"error": {"message": f"unknown field {refused[0]}"}}
            return httpx.Response(400, json=error, request=request)
        if self.fail_with:
            status, message = self.fail_with
            error = {"error": {"message": message}}
            return httpx.Response(status, json=error, request=request)
        prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        length = self.tokenize(prompt)
        cached = max((self.tokenize(old) for old in self.seen if prompt.startswith(old)), default=0)
        cached = min(cached, length - 1)  # the last token is always computed
        self.seen.append(prompt)
        usage = self._usage(length, body["max_tokens"], cached)
        if not body["stream"]:
            return httpx.Response(200, json={"usage": usage}, request=request)
        return httpx.Response(200, stream=_Stream(self._events(body, usage, cached)))

    def _metrics(self) -> str:
        experts = {
            "step_us_pass": 0,
            "slot_hits": 7 * self.steps,
            "slot_misses": 3 * self.steps,
            "expert_bytes": 21 * self.steps,
            "expert_bytes_pass": 0,
            "distinct_experts": 10 * self.steps,
            "distinct_experts_pass": 0,
        }
        told = [f"freetoken_engine_{name}_total {value}.0\n" for name, value in experts.items()]
        return "".join(told if self.tells_experts else []) + (
            "# HELP freetoken_engine_steps Total of the engine\n"
            f"freetoken_engine_steps_total {float(self.steps)}\n"
            "freetoken_engine_steps_pass_total 0.0\n"
            f"freetoken_engine_step_us_total {self.step_us}\n"
        )

    def _step(self, seconds: float) -> None:
        """Time goes by; `worker_share` of it in the worker."""
        self.now_s += seconds
        self.steps += 1
        self.step_us += seconds * 1e6 * self.worker_share

    def _usage(self, prompt: int, completion: int, cached: int) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
        if not self.llama_cpp:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return usage

    async def _events(
        self, body: dict[str, Any], usage: dict[str, Any], cached: int
    ) -> AsyncIterator[bytes]:
        is_chat = "messages" in body
        if is_chat:
            yield _event(choices=[{"delta": {"role": "assistant", "content": ""}}])
        self._step(self.prefill_s * (usage["prompt_tokens"] - cached))
        self.decoding += 1
        for index in range(body["max_tokens"]):
            if self.break_off and index:
                raise httpx.ReadError("connection reset")
            if index:
                self._step(self.step_s / self.decoding)  # all streams share one step
                await asyncio.sleep(0)
            text = "" if self.silent_token else "x"
            yield _event(choices=[{"delta": {"content": text}} if is_chat else {"text": text}])
        self.decoding -= 1
        last: dict[str, Any] = {"choices": [{"text": "", "delta": {}, "finish_reason": "length"}]}
        if self.llama_cpp:
            last |= {"usage": usage, "timings": {"cache_n": cached}}
        yield _event(**last)
        if not self.llama_cpp and "stream_options" in body:
            yield _event(choices=[], usage=usage)
        yield b"data: [DONE]\n\n"


class _Stream(httpx.AsyncByteStream):
    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self._events = events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for event in self._events:
            yield event


def _event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"
