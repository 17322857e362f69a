"""`ft serve` for real, seen from outside: its processes, its HTTP, what it leaves behind."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.processes import Running, ft

START_S = 90


@dataclass
class Server:
    """A server that was ready. `runtime` held its run directory."""

    running: Running
    url: str
    runtime: Path

    @property
    def pids(self) -> dict[str, int]:
        """Of the three processes by their short names."""
        children = psutil.Process(self.running.process.pid).children()
        titles = {child.pid: " ".join(child.cmdline()) for child in children}
        return {
            name: pid
            for pid, title in titles.items()
            for name in ("api", "scheduler", "worker")
            if title.strip() == f"freetoken-{name}"
        }

    def complete(self, prompt: str = "abc", max_tokens: int = 4, timeout_s: float = 20) -> str:
        """A greedy completion."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=timeout_s)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def is_ready(self) -> bool:
        return status_of(self.url) == 200


def status_of(url: str) -> int | None:
    """Of /health/ready, None if nobody listens."""
    try:
        return httpx.get(f"{url}/health/ready", timeout=5).status_code
    except httpx.TransportError:
        return None


def await_status(url: str, status: int | None, timeout_s: float) -> None:
    """Ask until /health/ready answers `status`."""
    deadline_s = time.monotonic() + timeout_s
    while (last := status_of(url)) != status:
        assert time.monotonic() < deadline_s, f"{last} instead of {status} after {timeout_s} s"


def start(model: Path, runtime: Path, *options: str, **environ: str) -> Running:
    return ft(
        *("serve", str(model), "--threads", "1", "--num-pages", "32", *options),
        XDG_RUNTIME_DIR=str(runtime),
        OMP_NUM_THREADS="1",
        **environ,
    )


def await_server(running: Running, runtime: Path) -> Server:
    found = running.wait_for(r"is served at (http://\S+)/v1", START_S)
    return Server(running, found[1], runtime)


class Stream:
    """A streamed completion that would go on for long; `events` are the parsed ones so far."""

    def __init__(self, url: str, max_tokens: int = 400) -> None:
        self._client = httpx.Client(timeout=20)
        body = {
            "prompt": "a",
            "max_tokens": max_tokens,
            "stream": True,
            "ignore_eos": True,
            "temperature": 0,
        }
        request = self._client.build_request("POST", f"{url}/v1/completions", json=body)
        self._response = self._client.send(request, stream=True)
        assert self._response.status_code == 200
        self._lines = self._response.iter_lines()
        self.events: list[dict[str, object]] = []

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self._response.close()
        self._client.close()

    def next(self) -> dict[str, object] | None:
        """The next event, None at the end of the stream."""
        for event in self._parsed():
            self.events.append(event)
            return event
        return None

    def drain(self) -> None:
        while self.next() is not None:
            pass

    def _parsed(self) -> Iterator[dict[str, object]]:
        for line in self._lines:
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))

    @property
    def finish_reasons(self) -> set[object]:
        reasons: set[object] = set()
        for event in self.events:
            choices = event.get("choices")
            assert isinstance(choices, list | None)
            reasons |= {choice["finish_reason"] for choice in choices or []}
        return reasons - {None}
