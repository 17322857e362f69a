"""One api's connection to the scheduler, and the processes between which it stands: for
benchmarks of the scheduler.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import zmq

from freetoken.wire.beats import BeatClient
from freetoken.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Beat,
    EngineState,
    Hello,
    Phase,
    Role,
    Submit,
    Tokens,
    Welcome,
)
from freetoken.wire.sockets import Dealer, Endpoints, connect_dealer

FAKE_WORKER = Path(__file__).parent / "fake_steps.py"
START_S = 30.0
BATCH = 256
"""Messages sent between two looks at what came: an api that does not read is cut off."""
LIMITS = (10**6, 10**9)
"""Of queued requests and tokens: never reached."""


class Client:
    """One api's connection: submits, aborts, counts tokens."""

    def __init__(self, run_dir: Path) -> None:
        endpoints = Endpoints.in_directory(run_dir)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        name = f"api-{os.getpid()}-{secrets.token_hex(3)}"
        beat = Beat(name, os.getpid(), 0, Phase.READY, "", 0, 0)
        self._beats = BeatClient(self._context, endpoints.beats, name, lambda: beat)
        self._dealer = Dealer(connect_dealer(self._context, endpoints.api, name))
        self._beats.start()
        self._dealer.send(Hello(PROTOCOL_VERSION, Role.API, name, os.getpid()))
        self.num_tokens = 0
        self.num_accepted = 0
        self.state: EngineState | None = None

    def submit(self, requests: Sequence[Submit]) -> None:
        """Returns when all are accepted."""
        for first in range(0, len(requests), BATCH):
            batch = requests[first : first + BATCH]
            wanted = self.num_accepted + len(batch)
            for request in batch:
                self._dealer.send(request)
            while self.num_accepted < wanted:
                self.read(0.01)

    def abort(self, requests: Sequence[Submit]) -> None:
        for first in range(0, len(requests), BATCH):
            for request in requests[first : first + BATCH]:
                self._dealer.send(Abort(request.request_id))
            self.read(0.01)

    def read(self, duration_s: float) -> None:
        """Take what comes for so long."""
        end_s = time.monotonic() + duration_s
        while (left_s := end_s - time.monotonic()) > 0:
            match self._dealer.receive(max(1, int(left_s * 1e3))):
                case Tokens() as tokens:
                    self.num_tokens += len(tokens.deltas)
                case Accepted():
                    self.num_accepted += 1
                case EngineState() as state:
                    self.state = state
                case None | Welcome():
                    pass
                case message:
                    raise SystemExit(f"unexpected: {message}")

    def wait(self, running: int, waiting: int) -> None:
        """Until the scheduler says that so many run and wait."""
        end_s = time.monotonic() + START_S
        while self.state is None or (self.state.running, self.state.waiting) != (running, waiting):
            if time.monotonic() > end_s:
                raise SystemExit(f"no {running} running and {waiting} waiting: {self.state}")
            self.read(0.05)

    def wait_ready(self) -> None:
        end_s = time.monotonic() + START_S
        while self.state is None or self.state.phase is not Phase.READY:
            if time.monotonic() > end_s:
                raise SystemExit(f"the scheduler does not become ready: {self.state}")
            self.read(0.05)

    def close(self) -> None:
        self._beats.stop()
        self._dealer.socket.close(0)
        self._context.term()


@contextmanager
def processes(run_dir: Path, rows: int, step_ms: float) -> Iterator[int]:
    """The scheduler and its worker; the scheduler's pid."""
    bounds = ["--max-queued-requests", str(LIMITS[0]), "--max-queued-tokens", str(LIMITS[1])]
    scheduler = [sys.executable, "-m", "freetoken.cli", "scheduler", "--run-dir", str(run_dir)]
    worker = [sys.executable, str(FAKE_WORKER), str(run_dir), "--rows", str(rows)]
    started = [
        subprocess.Popen([*scheduler, *bounds, "--log-level", "ERROR"]),
        subprocess.Popen([*worker, "--step-ms", str(step_ms)]),
    ]
    try:
        yield started[0].pid
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()
