"""Api and scheduler as they are, over real sockets and HTTP, before a scripted worker."""

from __future__ import annotations

import re
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from freetoken.scheduler.health import Health
from freetoken.scheduler.process import SchedulerProcess
from freetoken.scheduler.scheduler import Scheduler
from freetoken.wire.sockets import Endpoints
from tests.api.running import RunningApi
from tests.fakes.worker import FakeWorker, WorkerScript

VOCAB = 400
"""More than the tiny tokenizer's, so that every id it makes is one."""


class Serving:
    """`http` speaks to the api; `counters` are those of `/metrics`."""

    def __init__(self, api: RunningApi) -> None:
        self.api = api
        self.http = api.http

    def complete(self, prompt: list[int], max_tokens: int | None = 4, **fields: Any) -> Any:
        """A greedy completion of token ids: the parsed answer."""
        response = self.post(prompt, max_tokens, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    def post(self, prompt: list[int], max_tokens: int | None = 4, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=body_of(prompt, max_tokens, **fields))

    def counters(self) -> dict[str, float]:
        found = re.findall(
            r"(?m)^freetoken_engine_(\w+?)(?:_total)? (\S+)$", self.http.get("/metrics").text
        )
        return {name: float(value) for name, value in found}

    def control(self) -> None:
        """A small request works, and all is as if nothing had been."""
        assert self.complete([3, 1, 4], 5)["usage"]["completion_tokens"] == 5
        self.api.wait_idle()
        deadline_s = time.monotonic() + 10
        while any(self.counters()[name] for name in ("pages_used", "running", "waiting")):
            assert time.monotonic() < deadline_s, self.counters()
            time.sleep(0.05)


def body_of(prompt: list[int], max_tokens: int | None = 4, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
    return body if max_tokens is None else {**body, "max_tokens": max_tokens}


@contextmanager
def serving(
    model_dir: Path, script: WorkerScript, max_queued: tuple[int, int] = (1000, 10**6)
) -> Iterator[Serving]:
    ours, theirs = socket.socketpair()
    seeds = count(1)
    with ours, theirs, tempfile.TemporaryDirectory(prefix="ft") as path:
        run_dir = Path(path)
        process = SchedulerProcess(
            Endpoints.in_directory(run_dir),
            Scheduler(*max_queued, lambda: next(seeds)),
            Health(60.0),
            theirs.fileno(),
            report_s=0.05,
        )
        thread = threading.Thread(target=process.serve)
        thread.start()
        worker = FakeWorker(run_dir, script).start()
        api = RunningApi(model_dir, run_dir)
        try:
            api.wait_ready()
            yield Serving(api)
        finally:
            api.stop()
            worker.stop()
            ours.send(b"x")
            thread.join(10)
            assert not thread.is_alive()
