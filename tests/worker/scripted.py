"""A scheduler for tests: real sockets, and only what the test tells it to say."""

from __future__ import annotations

import os
from pathlib import Path

import zmq

from freetoken.wire.beats import BeatServer
from freetoken.wire.messages import (
    PROTOCOL_VERSION,
    Beat,
    Hello,
    Message,
    Phase,
    Welcome,
    WorkerReady,
)
from freetoken.wire.sockets import Endpoints, Router, bind_router

WAIT_MS = 60_000  # a process of its own may load torch on a busy machine


class ScriptedScheduler:
    """`pid` and `epoch` are what it claims to be; the worker gets epoch 1, 2, … with each Hello."""

    def __init__(self, run_dir: Path, *, pid: int | None = None, epoch: int = 7) -> None:
        self.pid = pid or os.getpid()
        self.epoch = epoch
        self.worker_epoch = 0
        self.peer = b""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        endpoints = Endpoints.in_directory(run_dir)
        self._router = Router(bind_router(self._context, endpoints.worker))
        self.beats = BeatServer(self._context, endpoints.beats, self._make_beat)
        self.beats.start()

    def receive(self, timeout_ms: int = WAIT_MS) -> Message:
        """The next message; AssertionError if none comes in time."""
        while (found := self._router.receive()) is None:
            assert self._router.socket.poll(timeout_ms), "nothing came from the worker"
        self.peer = found[0]
        return found[1]

    def expect(self, kind: type[Message]) -> Message:
        """The next message, which is of `kind`."""
        message = self.receive()
        assert isinstance(message, kind), message
        return message

    def welcome(self) -> WorkerReady:
        """Answer the Hello and wait until the worker is ready."""
        hello = self.expect(Hello)
        assert hello.protocol == PROTOCOL_VERSION
        return self.answer_hello()

    def answer_hello(self) -> WorkerReady:
        self.worker_epoch += 1
        self.send(Welcome(PROTOCOL_VERSION, self.pid, self.worker_epoch))
        ready = self.receive()
        while isinstance(ready, Hello):  # said again while we were slow
            ready = self.receive()
        assert isinstance(ready, WorkerReady), ready
        return ready

    def send(self, message: Message) -> None:
        assert self._router.send(self.peer, message), "the worker is gone"

    def close(self) -> None:
        self.beats.stop()
        self._router.socket.close(0)
        self._context.term()

    def _make_beat(self) -> Beat:
        return Beat("scheduler", self.pid, self.epoch, Phase.READY, "", 0, 0)
