"""`--worker-restarts`: a worker that is killed comes again and finds its experts in memory."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.server import START_S, Server, Stream, await_server, await_status, start, status_of
from tests.processes import is_gone, kill

OPTIONS = (
    *("--experts", "slots", "--moe-cache-size", "4", "--dtype", "float32"),
    *("--worker-restarts", "1", "--port", "0"),
)
DENSE_BYTES = re.compile(r"weights\.read bytes=(\d+)")


@pytest.fixture
def server(tiny_checkpoint: Path, runtime: Path) -> Iterator[Server]:
    with start(tiny_checkpoint, runtime, *OPTIONS) as running:
        yield await_server(running, runtime)


def standbys_of(server: Server) -> list[int]:
    children = psutil.Process(server.running.process.pid).children()
    return [child.pid for child in children if "--stand-by" in child.cmdline()]


def test_a_killed_worker_comes_again_with_its_experts(server: Server) -> None:
    text = server.complete("abcdefgh", 12)
    assert "bank.kept" in server.running.output
    pids = server.pids
    (standby,) = standbys_of(server)
    with Stream(server.url) as stream, Stream(server.url) as other:
        stream.next()
        other.next()
        killed_s = time.monotonic()
        kill(pids["worker"])
        for victim in (stream, other):
            victim.drain()
            assert any("error" in event for event in victim.events), victim.events[-2:]
        assert time.monotonic() - killed_s < 2
    assert status_of(server.url) == 503
    await_status(server.url, 200, START_S)
    assert server.complete("abcdefgh", 12) == text
    again = server.pids
    assert again["worker"] == standby
    assert (again["api"], again["scheduler"]) == (pids["api"], pids["scheduler"])
    server.running.wait_for(r"bank\.found layers=2 filled=2")
    assert "check.known" in server.running.output
    first, second = (int(size) for size in DENSE_BYTES.findall(server.running.output))
    experts = 2 * 4 * 3 * 16 * 32 * 4  # two layers of four experts, three matrices in fp32
    assert first - second == experts
    away = server.running.wait_for(r"server\.ready_again after_s=([0-9.]+)")
    assert 0.5 < float(away[1]) <= time.monotonic() - killed_s, "since it was killed"
    assert "standby.ended" not in server.running.output


@pytest.mark.slow
def test_a_worker_that_dies_too_often_ends_the_server(server: Server) -> None:
    kill(server.pids["worker"])
    await_status(server.url, 503, 10)
    await_status(server.url, 200, START_S)
    pids = server.pids
    kill(pids["worker"])
    assert server.running.wait(10) == 1
    assert "killed by SIGKILL" in server.running.last_line
    assert "2 times in 60 s" in server.running.last_line
    assert all(is_gone(pid, 0) for pid in pids.values())
    assert list(server.runtime.iterdir()) == []


@pytest.mark.slow
def test_a_worker_that_hangs_is_killed_and_another_takes_its_place(server: Server) -> None:
    text = server.complete("abcdefgh", 12)
    hung = server.pids["worker"]
    with Stream(server.url) as stream:
        stream.next()
        os.kill(hung, signal.SIGSTOP)
        stream.drain()
        assert any("error" in event for event in stream.events), stream.events[-2:]
    assert status_of(server.url) == 503
    await_status(server.url, 200, START_S)
    assert is_gone(hung, 0)
    assert server.pids["worker"] != hung
    server.running.wait_for(
        rf"freetoken-worker hung and was killed: .*process {hung} has had no heartbeat for 5 s"
    )
    assert server.complete("abcdefgh", 12) == text
