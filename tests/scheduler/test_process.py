"""The scheduler process over real sockets, with stand-ins for its peers."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from freetoken.scheduler.health import Health
from freetoken.scheduler.process import SchedulerProcess
from freetoken.scheduler.scheduler import Scheduler
from freetoken.wire.messages import Phase
from freetoken.wire.sockets import Endpoints
from tests.fakes.api import FakeApi
from tests.fakes.model import complete
from tests.fakes.worker import FakeWorker, WorkerScript
from tests.scheduler.drive import sampling


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ft-") as path:
        yield Path(path)


@contextmanager
def scheduler_in(run_dir: Path, stall_timeout_s: float = 60.0) -> Iterator[SchedulerProcess]:
    """The I/O loop in a thread; stopped and joined at the end."""
    ours, theirs = socket.socketpair()
    process = SchedulerProcess(
        Endpoints.in_directory(run_dir),
        Scheduler(100, 100_000, lambda: 1),
        Health(stall_timeout_s),
        theirs.fileno(),
    )
    thread = threading.Thread(target=process.serve)
    with ours, theirs:
        thread.start()
        try:
            yield process
        finally:
            ours.send(b"x")
            thread.join(10)
            assert not thread.is_alive()
    assert not list(run_dir.iterdir()), "sockets are left behind"


@contextmanager
def worker_in(run_dir: Path, script: WorkerScript | None = None) -> Iterator[FakeWorker]:
    worker = FakeWorker(run_dir, script).start()
    try:
        yield worker
    finally:
        worker.stop()


def test_a_request_crosses_all_three_processes(run_dir: Path) -> None:
    with scheduler_in(run_dir), worker_in(run_dir), FakeApi(run_dir) as api:
        api.connect()
        assert api.wait_phase(Phase.READY).context_tokens == 1024
        assert api.complete("a", [1, 2, 3], 5) == complete([1, 2, 3], 5, sampling(), 256)
