"""Each process killed while clients stream: what they see, what is left, and starting again."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.server import Server, Stream, await_server, start, status_of
from tests.processes import Running, free_port, is_gone, kill


def assert_ended_with_an_error(stream: Stream, since_s: float) -> None:
    stream.drain()
    assert time.monotonic() - since_s < 2
    assert any("error" in event for event in stream.events), stream.events[-2:]
    assert stream.finish_reasons <= {"error"}


def assert_nothing_left(server: Server, pids: dict[str, int]) -> None:
    assert all(is_gone(pid, 0) for pid in pids.values())
    assert list(server.runtime.iterdir()) == []


@pytest.mark.parametrize("victim", ["worker", pytest.param("scheduler", marks=pytest.mark.slow)])
def test_a_vital_process_dies_while_clients_stream(
    tiny_checkpoint: Path, runtime: Path, victim: str
) -> None:
    with start(tiny_checkpoint, runtime, "--port", "0") as running:
        server = await_server(running, runtime)
        pids = server.pids
        with Stream(server.url) as stream, Stream(server.url) as other:
            stream.next()
            other.next()
            begun_s = time.monotonic()
            kill(pids[victim])
            assert_ended_with_an_error(stream, begun_s)
            assert_ended_with_an_error(other, begun_s)
        assert status_of(server.url) == 503
        assert running.wait(10) == 1
        assert time.monotonic() - begun_s > 1.9
        assert running.last_line.startswith(
            f"ft: error: freetoken-{victim} was killed by SIGKILL"
        ), running.output
        assert_nothing_left(server, pids)


@pytest.mark.slow
def test_a_worker_that_stops_for_long_ends_the_server(tiny_checkpoint: Path, runtime: Path) -> None:
    with start(tiny_checkpoint, runtime, "--port", "0") as running:
        server = await_server(running, runtime)
        pids, text = server.pids, server.complete()
        with Stream(server.url) as stream:
            stream.next()
            os.kill(pids["worker"], signal.SIGSTOP)
            os.kill(pids["worker"], signal.SIGCONT)
            stream.drain()
            assert stream.finish_reasons == {"length"}, "it was short"
        assert server.complete() == text
        with Stream(server.url) as stream:
            stream.next()
            os.kill(pids["worker"], signal.SIGSTOP)
            stream.drain()
            assert any("error" in event for event in stream.events), stream.events[-2:]
        assert status_of(server.url) == 503
        assert running.wait(15) == 1
        assert running.last_line.startswith("ft: error: freetoken-worker hung and was killed: ")
        assert running.last_line.endswith(f"{pids['worker']} has had no heartbeat for 5 s")
        assert_nothing_left(server, pids)


def test_the_launcher_is_killed_and_the_same_port_serves_again(
    tiny_checkpoint: Path, runtime: Path
) -> None:
    port = str(free_port())
    with start(tiny_checkpoint, runtime, "--port", port) as running:
        server = await_server(running, runtime)
        pids = server.pids
        with Stream(server.url) as stream:
            stream.next()
            kill(running.process.pid)
            begun_s = time.monotonic()
            assert all(is_gone(pid, 3) for pid in pids.values())
            assert time.monotonic() - begun_s < 3
    assert list(runtime.iterdir()) == [], "the scheduler cleans up for the launcher"
    with start(tiny_checkpoint, runtime, "--port", port) as again:
        second = await_server(again, runtime)
        with Stream(second.url) as stream:
            stream.next()
            pids = second.pids
            begun_s = time.monotonic()
            again.process.send_signal(signal.SIGTERM)
            stream.drain()
        assert again.wait(5) == 0
        assert time.monotonic() - begun_s < 5
        assert_nothing_left(second, pids)


def test_a_signal_while_loading_ends_all(tiny_checkpoint: Path, runtime: Path) -> None:
    running: Running
    with start(tiny_checkpoint, runtime, "--port", "0") as running:
        running.wait_for("checked", 20)
        running.wait_for("freetoken-scheduler")
        running.process.send_signal(signal.SIGTERM)
        assert running.wait(5) == 0
        assert list(runtime.iterdir()) == []
