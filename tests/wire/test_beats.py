from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from freetoken.wire.beats import (
    LOST_S,
    MAX_BREAK_S,
    Attention,
    BeatClient,
    BeatServer,
    open_exit_fd,
)
from freetoken.wire.codec import encode
from freetoken.wire.messages import Abort, Beat, Phase
from freetoken.wire.sockets import connect_dealer

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def context() -> Iterator[Context]:
    made: Context = zmq.Context()
    yield made
    made.destroy(0)


@pytest.fixture
def endpoint() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="ft-") as path:
        yield f"ipc://{path}/s"


def beat(name: str, epoch: int = 0) -> Beat:
    return Beat(name, os.getpid(), epoch, Phase.LOADING, "shard 1", 1, 2)


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline_s
        select.select([], [], [], 0.01)


def test_attention_begins_anew_after_a_break() -> None:
    attention = Attention()
    assert attention.since(10.0) == 10.0
    assert attention.since(10.0 + MAX_BREAK_S) == 10.0
    assert attention.since(10.1 + 2 * MAX_BREAK_S) == 10.1 + 2 * MAX_BREAK_S
    assert attention.since(10.2 + 2 * MAX_BREAK_S) == 10.1 + 2 * MAX_BREAK_S


def test_both_sides_hear_each_other_and_notice_silence(context: Context, endpoint: str) -> None:
    server = BeatServer(context, endpoint, lambda: beat("scheduler", epoch=77))
    client = BeatClient(context, endpoint, "w", lambda: beat("w"))
    assert not server.is_lost("w", time.monotonic() + 1000, 0.0), "never heard is not lost"
    assert not client.is_lost(time.monotonic() + 1000, 0.0)
    server.start()
    client.start()
    try:
        wait_until(lambda: client.last)
        heard = server.heard("w")
        assert heard is not None
        assert heard.beat == beat("w")
        assert client.last is not None
        assert client.last.beat.epoch == 77
        assert not server.is_lost("w", heard.at_s + LOST_S, 0.0)
        assert server.is_lost("w", heard.at_s + LOST_S + 0.01, 0.0)
        assert not server.is_lost("w", heard.at_s + LOST_S + 0.01, heard.at_s + 0.02)
        last_s = client.last.at_s
        assert client.is_lost(last_s + LOST_S + 0.01, 0.0)
        assert not client.is_lost(last_s + LOST_S + 0.01, last_s + 0.02)
    finally:
        client.stop()
        server.forget("w")
        assert server.heard("w") is None
        server.stop()


def test_the_server_counts_and_survives_frames_that_are_no_beats(
    context: Context, endpoint: str
) -> None:
    server = BeatServer(context, endpoint, lambda: beat("scheduler"))
    server.start()
    rude = connect_dealer(context, endpoint, "rude")
    client = BeatClient(context, endpoint, "w", lambda: beat("w"))
    try:
        rude.send(b"\xc1")
        rude.send(b"")
        rude.send_multipart([b"a", b"b", b"c"])
        rude.send(encode(Abort("r")))
        client.start()
        wait_until(lambda: server.heard("w"))
        wait_until(lambda: server.num_malformed == 4)
    finally:
        client.stop()
        server.stop()
        rude.close(0)


def test_an_exit_is_noticed_at_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    fd = open_exit_fd(process.pid)
    if fd is None:
        process.communicate(b"\n")
        pytest.skip("this system has no pidfds")
    try:
        assert not select.select([fd], [], [], 0)[0]
        process.communicate(b"\n")
        assert select.select([fd], [], [], 5)[0]
    finally:
        os.close(fd)


@pytest.mark.parametrize("pid", [-1, 0, 1 << 40])
def test_a_pid_that_cannot_be_watched_gives_none(pid: int) -> None:
    assert open_exit_fd(pid) is None
