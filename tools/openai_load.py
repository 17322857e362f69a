"""One streamed request to an OpenAI-compatible server, timed event by event.

Knows the wire format of /v1/completions and /v1/chat/completions and how servers differ in it
(FreeToken, vLLM, SGLang, llama.cpp); knows nothing about benchmarks. Events are stamped as they
arrive and parsed after the stream has ended, so that parsing does not delay the next stamp.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx


class BenchError(Exception):
    """The benchmark cannot go on; the message is for its user."""


@dataclass(frozen=True, slots=True)
class Timing:
    """A finished stream. Times are the clock's, in seconds; `events_s` are events with text."""

    sent_s: float
    events_s: tuple[float, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None

    @property
    def ttft_ms(self) -> float:
        return (self.events_s[0] - self.sent_s) * 1e3

    @property
    def tokens_per_event(self) -> float:
        """1 unless the server holds tokens back (half characters) or sends several at once."""
        return self.completion_tokens / len(self.events_s)


@dataclass(frozen=True, slots=True)
class Ask:
    """What is sent beside the prompt."""

    max_tokens: int
    temperature: float = 0.0


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Which server, in a benchmark's command line."""
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:1919", help="where the server is (default: %(default)s)")
    add("--model", help="default: the first in /v1/models")
    add("--api-key", help="sent as a bearer token")


class Server:
    """A server under test. Use as an async context manager."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        is_chat: bool = False,
        timeout_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        self.url = base
        self.is_chat = is_chat
        self.model = model
        self.max_model_len: int | None = None
        self.extras: dict[str, Any] = {
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        self._clock = clock
        self._http = httpx.AsyncClient(
            base_url=base,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=timeout_s,
            transport=transport,
            limits=httpx.Limits(max_connections=None),
        )

    async def __aenter__(self) -> Server:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def learn(self) -> None:
        """Read /v1/models: checks that the server answers, picks a model, learns its limit."""
        try:
            response = await self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise BenchError(
                f"{self.url} does not answer ({error!r}); is the server up?"
            ) from error
        if response.status_code != httpx.codes.OK:
            raise BenchError(f"GET /v1/models: {_explain(response)}")
        models = response.json().get("data", [])
        names = [model["id"] for model in models]
        if self.model is None:
            if not names:
                raise BenchError(f"{self.url} lists no model; name one with --model")
            self.model = names[0]
        for model in models:
            if model["id"] == self.model:
                self.max_model_len = model.get("max_model_len")

    async def drop_unsupported(self) -> list[str]:
        """Find out which of `extras` the server refuses, and stop sending those."""
        dropped = []
        for name in list(self.extras):
            trial = self._body("a", Ask(max_tokens=1)) | {"stream": True}
            kept = {key: trial[key] for key in trial if key not in self.extras or key == name}
            if (await self._post(kept)).status_code == httpx.codes.BAD_REQUEST:
                del self.extras[name]
                dropped.append(name)
        return dropped

    async def get_text(self, path: str) -> str:
        """The body of GET `path`."""
        try:
            response = await self._http.get(path)
        except httpx.HTTPError as error:
            raise BenchError(
                f"{self.url} does not answer ({error!r}); is the server up?"
            ) from error
        if response.status_code != httpx.codes.OK:
            raise BenchError(_explain(response))
        return response.text

    async def count_prompt_tokens(self, prompt: str) -> int:
        """What the server counts for `prompt`, template included."""
        body = self._body(prompt, Ask(max_tokens=1)) | {"stream": False}
        body.pop("stream_options", None)
        response = await self._post(body)
        if response.status_code != httpx.codes.OK:
            raise BenchError(_explain(response))
        usage = response.json().get("usage") or {}
        if "prompt_tokens" not in usage:
            raise BenchError(f"{self.url} sends no usage.prompt_tokens; prompts cannot be sized")
        return int(usage["prompt_tokens"])

    async def stream(self, prompt: str, ask: Ask) -> Timing:
        """Send `prompt`, read the stream to its end. BenchError on anything but a full answer."""
        body = self._body(prompt, ask) | {"stream": True}
        stamped: list[tuple[float, bytes]] = []
        request = self._http.build_request("POST", self._path, json=body)
        sent_s = self._clock()
        try:
            try:
                response = await self._http.send(request, stream=True)
            except httpx.RemoteProtocolError:  # it had closed the idle connection: a new one
                sent_s = self._clock()
                response = await self._http.send(request, stream=True)
            async with contextlib.aclosing(response):
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise BenchError(_explain(response))
                async for chunk in response.aiter_raw():
                    stamped.append((self._clock(), chunk))
        except httpx.HTTPError as error:
            raise BenchError(f"{self.url}{self._path} broke off: {error!r}") from error
        return _read_events(sent_s, stamped)

    @property
    def _path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    async def _post(self, body: dict[str, Any]) -> httpx.Response:
        try:
            try:
                return await self._http.post(self._path, json=body)
            except httpx.RemoteProtocolError:  # it had closed the idle connection
                return await self._http.post(self._path, json=body)
        except httpx.HTTPError as error:
            raise BenchError(f"{self.url}{self._path}: {error!r}") from error

    def _body(self, prompt: str, ask: Ask) -> dict[str, Any]:
        text = {"messages": [{"role": "user", "content": prompt}]} if self.is_chat else {}
        return {
            "model": self.model,
            **(text or {"prompt": prompt}),
            "max_tokens": ask.max_tokens,
            "temperature": ask.temperature,
            "top_p": 1.0,  # not what generation_config.json says
            **self.extras,
        }


def _read_events(sent_s: float, stamped: list[tuple[float, bytes]]) -> Timing:
    """SSE: `data:` lines, each stamped with the chunk that completed it."""
    events_s: list[float] = []
    usage: dict[str, Any] = {}
    timings: dict[str, Any] = {}
    finished_s: float | None = None
    rest = b""
    for at_s, chunk in stamped:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise BenchError(f"the stream ended with an error: {event['error']}")
            usage = event.get("usage") or usage
            timings = event.get("timings") or timings  # llama.cpp
            choices = event.get("choices", [])
            if any(_has_text(choice) for choice in choices):
                events_s.append(at_s)
            if any(choice.get("finish_reason") for choice in choices):
                finished_s = at_s
    if finished_s is None:
        raise BenchError("the stream ended without a finish reason")
    if not events_s:  # nothing but half a character or a stop token was generated
        events_s.append(finished_s)
    details = usage.get("prompt_tokens_details") or {}
    return Timing(
        sent_s=sent_s,
        events_s=tuple(events_s),
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", len(events_s)),
        cached_tokens=details.get("cached_tokens", timings.get("cache_n")),
    )


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    texts = (choice.get("text"), delta.get("content"), delta.get("reasoning_content"))
    return any(texts)


def _explain(response: httpx.Response) -> str:
    try:
        error = response.json().get("error", {})
        detail = error.get("message") if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        detail = response.text[:200]
    return f"HTTP {response.status_code} from {response.request.url}: {detail}"
