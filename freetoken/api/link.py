"""The line to the scheduler: hello, bytes in and out, and noticing when it is gone.

A `Link` lives on one event loop and reads its zmq socket from there, without threads or tasks
between a message and its taker. When the scheduler is lost (its process exits, its heartbeats stop
or tell of another life), a new hello goes out on a new socket with a new identity, so that nothing
of the old life is left in a queue.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from collections import deque
from typing import Protocol

import zmq

from freetoken import log
from freetoken.errors import ProtocolError
from freetoken.wire.beats import LOST_S, Attention, BeatClient, open_exit_fd
from freetoken.wire.codec import WireError, decode, encode
from freetoken.wire.messages import (
    PROTOCOL_VERSION,
    Beat,
    Hello,
    Message,
    Phase,
    Refused,
    Role,
    Welcome,
)
from freetoken.wire.sockets import CurveKeys, Endpoints, connect_dealer

CHECK_S = 0.5
"""How often lost heartbeats, an unanswered hello and unsent messages are looked at."""

HELLO_AGAIN_S = 2.0
MAX_MESSAGES_PER_TURN = 256
"""Then the event loop gets a turn, whatever more is queued."""

_log = log.get(__name__)


class Taker(Protocol):
    """Who uses the link; called on the loop."""

    def take(self, message: Message) -> None:
        """Anything that is not about the link itself."""

    def lost(self, reason: str, given_up_pid: int) -> None:
        """The scheduler is gone; a new hello is about to go out.

        `given_up_pid`: its process, which may still run without being of any use, else 0.
        """

    def fatal(self, error: Exception) -> None:
        """This process must end."""


class Link:
    """`is_up` from a Welcome until the scheduler is lost."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoints: Endpoints,
        taker: Taker,
        keys: CurveKeys | None = None,
    ) -> None:
        self.name = f"api-{os.getpid()}-{secrets.token_hex(4)}"
        self._num_malformed = 0
        self._context = context
        self._endpoints = endpoints
        self._taker = taker
        self._keys = keys
        self._lives = itertools.count()
        self._beats = BeatClient(context, endpoints.beats, self.name, self._make_beat, keys)
        self._socket: zmq.Socket[bytes] | None = None
        self._welcome: Welcome | None = None
        self._welcomed_at_s = 0.0
        self._told_at_s = 0.0  # when the scheduler last sent anything
        self._hello_at_s = 0.0
        self._exit_fd: int | None = None
        self._attention = Attention()
        self._unsent: deque[Message] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_up(self) -> bool:
        return self._welcome is not None

    @property
    def num_malformed(self) -> int:
        """Frames that were no message or no beat, dropped."""
        return self._num_malformed + self._beats.num_malformed

    def start(self) -> None:
        """Begin to talk, from within the running loop."""
        self._loop = asyncio.get_running_loop()
        self._beats.start()
        self._connect()
        self._check()

    def stop(self) -> None:
        """Let go of every socket and thread; what was sent still has 0.2 s to leave."""
        if self._timer is not None:
            self._timer.cancel()
        self._forget_exit_fd()
        self._close(linger_ms=200)
        self._beats.stop()

    def send(self, message: Message) -> bool:
        """False if the queue is full: the scheduler does not read."""
        assert self._socket is not None
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        if _option(self._socket, zmq.EVENTS) & zmq.POLLIN:
            self._loop.call_soon(self._read)  # sending may eat the wake-up of the descriptor
        return True

    def send_surely(self, message: Message) -> None:
        """Now, or as soon as the queue has room; forgotten if the scheduler is lost first."""
        if self._unsent or not self.send(message):
            self._unsent.append(message)

    def _connect(self) -> None:
        """A new socket with a new identity, and Hello on it."""
        self._close(linger_ms=0)
        self._unsent.clear()
        identity = f"{self.name}-{next(self._lives)}"
        self._socket = connect_dealer(self._context, self._endpoints.api, identity, self._keys)
        self._loop.add_reader(_option(self._socket, zmq.FD), self._read)
        self._hello_at_s = time.monotonic()
        self.send(Hello(PROTOCOL_VERSION, Role.API, self.name, os.getpid()))

    def _close(self, linger_ms: int) -> None:
        if self._socket is not None:
            self._loop.remove_reader(_option(self._socket, zmq.FD))
            self._socket.close(linger=linger_ms)
            self._socket = None

    def _lose(self, reason: str, given_up_pid: int = 0) -> None:
        _log.warning(log.event("engine.lost", reason=reason))
        self._welcome = None
        self._forget_exit_fd()
        self._taker.lost(reason, given_up_pid)
        self._connect()

    def _check(self) -> None:
        """Every CHECK_S: what no message tells."""
        self._timer = self._loop.call_later(CHECK_S, self._check)
        now_s = time.monotonic()
        since_s = self._attention.since(now_s)
        if self._welcome is None:
            if now_s - self._hello_at_s > HELLO_AGAIN_S:
                self._connect()
        elif now_s - self._welcomed_at_s > LOST_S and self._beats.is_lost(now_s, since_s):
            self._lose(f"no heartbeat of the scheduler for {LOST_S:g} s", self._welcome.pid)
        elif self._is_other_life(self._welcome):
            self._lose("the scheduler was restarted")
        elif self._is_forgotten(now_s, since_s):
            self._lose(f"the scheduler has told nothing for {LOST_S:g} s")
        while self._unsent and self.send(self._unsent[0]):
            self._unsent.popleft()

    def _is_other_life(self, welcome: Welcome) -> bool:
        heard = self._beats.last
        if heard is None or heard.at_s <= self._welcomed_at_s + CHECK_S:
            return False
        return heard.beat.epoch != welcome.epoch

    def _is_forgotten(self, now_s: float, since_s: float) -> bool:
        """True if the scheduler sends its state, as it does all the time, to us no more: it has
        given us up while we were stopped or starved."""
        return now_s - max(self._told_at_s, since_s) > LOST_S

    def _read(self) -> None:
        """All that is queued; the descriptor is edge-triggered, so until nothing is left."""
        for _ in range(MAX_MESSAGES_PER_TURN):
            if self._socket is None:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._told_at_s = time.monotonic()
            try:
                if len(frames) != 1:
                    raise WireError(f"{len(frames)} frames instead of 1")
                message = decode(frames[0])
            except WireError as error:
                self._num_malformed += 1
                _log.warning(
                    log.event("wire.malformed", count=self._num_malformed, what=str(error))
                )
                continue
            if isinstance(message, Welcome):
                self._greet(message)
            elif isinstance(message, Refused):
                error_text = f"the scheduler refused this api: {message.reason}"
                self._taker.fatal(ProtocolError(error_text))
            else:
                self._taker.take(message)
        self._loop.call_soon(self._read)

    def _greet(self, welcome: Welcome) -> None:
        self._welcome = welcome
        self._welcomed_at_s = time.monotonic()
        _log.info(log.event("engine.welcome", pid=welcome.pid, epoch=welcome.epoch))
        self._forget_exit_fd()
        if self._endpoints.api.startswith("ipc://"):  # else the pid is another machine's
            self._exit_fd = open_exit_fd(welcome.pid)
        if self._exit_fd is not None:
            reason = f"the scheduler (pid {welcome.pid}) exited"
            self._loop.add_reader(self._exit_fd, self._lose, reason)

    def _forget_exit_fd(self) -> None:
        if self._exit_fd is not None:
            self._loop.remove_reader(self._exit_fd)
            os.close(self._exit_fd)
            self._exit_fd = None

    def _make_beat(self) -> Beat:
        return Beat(self.name, os.getpid(), 0, Phase.READY, "", 0, 0)


def _option(socket: zmq.Socket[bytes], option: int) -> int:
    value = socket.getsockopt(option)
    assert isinstance(value, int)
    return value
