"""The worker's connection to the scheduler: greeting, plans and results, and whether it lives.

A lost scheduler (its process ended, its beats stopped, or another life of it answers) shows up as
`Lost` from `receive`. The socket reconnects by itself, so all there is to do is to say Hello and
wait for a Welcome again; what is still queued from the old life bears its epoch. Used from one
thread; the beats run in their own.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass

import zmq

from freetoken import log
from freetoken.errors import EngineError, ProtocolError
from freetoken.wire.beats import LOST_S, Attention, BeatClient, open_exit_fd
from freetoken.wire.messages import (
    PROTOCOL_VERSION,
    Beat,
    FailureScope,
    Hello,
    Message,
    Phase,
    Refused,
    Role,
    Welcome,
    WorkerFailed,
)
from freetoken.wire.sockets import CurveKeys, Dealer, Endpoints, connect_dealer

GREET_AGAIN_S = 2.0
"""A scheduler that is alive for so long after our Hello and has not answered never got it: it went
to the one before."""
POLL_MS = 250
FAREWELL_MS = 1000

_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class Lost:
    """The scheduler is gone; `reason` is for the log."""

    reason: str


@dataclass
class Progress:
    """What the beats report. Written by the main thread, read by the beat thread."""

    phase: Phase = Phase.STARTING
    detail: str = "starting"
    done: int = 0
    total: int = 0


class SchedulerLink:
    def __init__(
        self, endpoints: Endpoints, progress: Progress, keys: CurveKeys | None = None
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._progress = progress
        self._name = f"worker-{os.getpid()}-{secrets.token_hex(4)}"
        socket = connect_dealer(self._context, endpoints.worker, self._name, keys)
        self._dealer = Dealer(socket)
        self._welcome: Welcome | None = None
        self._said_s = self._welcomed_s = 0.0
        self._scheduler_epoch: int | None = None
        self._exit_fd: int | None = None
        self._attention = Attention()
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._beats = BeatClient(self._context, endpoints.beats, self._name, self._make_beat, keys)
        self._beats.start()

    @property
    def epoch(self) -> int:
        assert self._welcome is not None, "not greeted yet"
        return self._welcome.epoch

    def say_hello(self) -> None:
        """Introduce this worker; the answer is awaited by `greet`."""
        self._forget_scheduler()
        self._said_s = time.monotonic()
        self.send(Hello(PROTOCOL_VERSION, Role.WORKER, self._name, os.getpid()))

    def greet(self) -> None:
        """Wait for the Welcome, however long.

        Raises ProtocolError for another protocol version and EngineError when refused.
        """
        while not self.hear_answer(POLL_MS):
            heard = self._beats.last
            if heard is not None and heard.at_s > self._said_s + GREET_AGAIN_S:
                self.say_hello()

    def hear_answer(self, timeout_ms: int) -> bool:
        """Whether we are welcome, if it is known in time. Raises as `greet` does."""
        if self._welcome is not None:
            return True
        message = self._dealer.receive(timeout_ms)
        if isinstance(message, Refused):
            raise EngineError(f"the scheduler refused this worker: {message.reason}")
        if isinstance(message, Welcome):
            self._accept(message)
        return self._welcome is not None

    def receive(self, timeout_ms: int = POLL_MS) -> Message | Lost | None:
        """The next message at once if one is queued, else within the timeout, else None."""
        message = self._dealer.receive(0)
        if message is None:
            for source, _ in self._poller.poll(timeout_ms):
                if source == self._exit_fd:
                    assert self._welcome is not None
                    return Lost(f"its process {self._welcome.pid} ended")
            message = self._dealer.receive(0)
        if isinstance(message, Welcome):  # an answer to a Hello said twice: a newer epoch
            self._accept(message)
        return message if message is not None else self._find_loss()

    def send(self, message: Message) -> None:
        self._dealer.send(message)

    def say_failed(self, reason: str) -> None:
        """Tell the scheduler, if it has welcomed us, why this process ends."""
        while self._welcome is None and (message := self._dealer.receive(0)) is not None:
            if isinstance(message, Welcome):
                self._accept(message)
        if self._welcome is not None:
            self.send(WorkerFailed(FailureScope.PROCESS, self.epoch, None, reason))

    def close(self) -> None:
        """Give the last messages a moment to leave, then end the beats and the sockets."""
        self._beats.stop()
        self._dealer.socket.close(FAREWELL_MS)
        self._forget_scheduler()
        self._context.term()

    # ---- inside

    def _accept(self, welcome: Welcome) -> None:
        if welcome.protocol != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the scheduler speaks protocol {welcome.protocol}, this worker "
                f"{PROTOCOL_VERSION}; run the same version of both"
            )
        self._forget_scheduler()
        self._welcome = welcome
        self._welcomed_s = time.monotonic()
        self._scheduler_epoch = None
        self._exit_fd = open_exit_fd(welcome.pid)
        if self._exit_fd is not None:
            self._poller.register(self._exit_fd, zmq.POLLIN)
        _log.info(log.event("scheduler.welcome", pid=welcome.pid, epoch=welcome.epoch))

    def _find_loss(self) -> Lost | None:
        heard, welcome = self._beats.last, self._welcome
        if welcome is None:
            return None
        now_s = time.monotonic()
        last_s = max(self._welcomed_s, self._attention.since(now_s))
        if heard is not None:
            last_s = max(last_s, heard.at_s)
        if now_s - last_s > LOST_S:
            return Lost(f"no heartbeat for {LOST_S} s")
        if heard is None or heard.at_s < self._welcomed_s:
            return None
        if heard.beat.pid != welcome.pid:
            return Lost(f"another scheduler answers, pid {heard.beat.pid} after {welcome.pid}")
        if self._scheduler_epoch is None:
            self._scheduler_epoch = heard.beat.epoch
        if heard.beat.epoch != self._scheduler_epoch:
            return Lost(f"its epoch went from {self._scheduler_epoch} to {heard.beat.epoch}")
        return None

    def _forget_scheduler(self) -> None:
        self._welcome = None
        if self._exit_fd is not None:
            self._poller.unregister(self._exit_fd)
            os.close(self._exit_fd)
            self._exit_fd = None

    def _make_beat(self) -> Beat:
        now = self._progress
        return Beat(self._name, os.getpid(), 0, now.phase, now.detail, now.done, now.total)
