"""The api's line to the scheduler: hello, requests out, tokens in, and noticing when it is gone.

`EngineClient` lives on one event loop and reads its zmq socket from there, without threads or
tasks between a message and the `Call` that waits for it. When the scheduler is lost, every open
call fails at once and a new hello goes out on a new socket, so nothing of the old life is left in
a queue.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from freetoken import log
from freetoken.api.calls import Call
from freetoken.errors import ErrorCode, ProtocolError, RequestError
from freetoken.wire.beats import LOST_S, BeatClient, open_exit_fd
from freetoken.wire.codec import WireError, decode, encode
from freetoken.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Beat,
    EngineState,
    Failed,
    Hello,
    Message,
    Phase,
    Refused,
    Role,
    Submit,
    Tokens,
    Welcome,
)
from freetoken.wire.sockets import CurveKeys, Endpoints, connect_dealer

CHECK_S = 0.5
"""How often lost heartbeats, an unanswered hello and unsent aborts are looked at."""

HELLO_AGAIN_S = 2.0
IDLE_POLL_S = 0.05
MAX_MESSAGES_PER_TURN = 256
"""Then the event loop gets a turn, whatever more is queued."""

_SERVING = (Phase.READY, Phase.STALLED)
_log = log.get(__name__)


class EngineClient:
    """Connects in `start`. `state` is the scheduler's last word, or our own while it is away."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoints: Endpoints,
        on_fatal: Callable[[Exception], None],
        keys: CurveKeys | None = None,
    ) -> None:
        self.name = f"api-{os.getpid()}-{secrets.token_hex(4)}"
        self.state = _away(Phase.STARTING, "waiting for the scheduler")
        self.num_malformed = 0
        self._context = context
        self._endpoints = endpoints
        self._keys = keys
        self._on_fatal = on_fatal
        self._lives = itertools.count()
        self._beats = BeatClient(context, endpoints.beats, self.name, self._make_beat, keys)
        self._socket: zmq.Socket[bytes] | None = None
        self._welcome: Welcome | None = None
        self._welcomed_at_s = 0.0
        self._hello_at_s = 0.0
        self._exit_fd: int | None = None
        self._calls: dict[str, Call] = {}
        self._unsent: deque[Message] = deque()
        self._orphans: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: str | None = None

    @property
    def num_open(self) -> int:
        """Sequences that the engine works on for us."""
        return len(self._calls)

    @property
    def context_tokens(self) -> int | None:
        """What one request may use; None until the worker is ready."""
        return self.state.context_tokens or None

    def start(self) -> None:
        """Begin to talk, from within the running loop."""
        self._loop = asyncio.get_running_loop()
        self._beats.start()
        self._connect()
        self._check()

    def stop(self) -> None:
        """Fail what is open, tell the scheduler, and let go of every socket and thread."""
        self.fail_all("the server is shutting down")
        if self._timer is not None:
            self._timer.cancel()
        self._forget_exit_fd()
        if self._socket is not None:
            self._loop.remove_reader(_option(self._socket, zmq.FD))
            self._socket.close(linger=200)
            self._socket = None
        self._beats.stop()

    # ---- requests

    def submit(self, submits: Sequence[Submit]) -> Call:
        """Hand over the sequences of one HTTP request; ENGINE_UNAVAILABLE if nobody takes them."""
        if self._refusal is not None:
            raise _lost(self._refusal)
        if self._welcome is None or self.state.phase not in _SERVING:
            raise self._unavailable()
        call = Call(submits, self._abort)
        for submit in submits:
            self._calls[submit.request_id] = call
            if not self._send(submit):
                error = _lost("the scheduler does not read its queue")
                call.fail(error, submit.request_id)
                raise error
        return call

    def refuse(self, reason: str) -> None:
        """Take no more requests; what is open goes on."""
        self._refusal = reason

    async def wait_idle(self) -> None:
        """Until nothing is open."""
        while self._calls:
            await asyncio.sleep(IDLE_POLL_S)

    def fail_all(self, reason: str) -> None:
        """End every open call with an error that gives `reason`."""
        for call in set(self._calls.values()):
            call.fail(_lost(reason))
        self._calls.clear()

    def _abort(self, request_id: str) -> None:
        # What still comes for it finds no call and is dropped.
        if self._calls.pop(request_id, None) is None:
            return
        if self._welcome is None:
            self._orphans.add(request_id)
        elif not self._send(Abort(request_id)):
            self._unsent.append(Abort(request_id))

    def _unavailable(self) -> RequestError:
        state = self.state
        progress = ""
        if state.total_bytes:
            progress = f", {state.loaded_bytes} of {state.total_bytes} bytes loaded"
        return _lost(f"the engine is {state.phase.value}: {state.detail}{progress}")

    # ---- the line

    def _connect(self) -> None:
        """A new socket with a new identity, and Hello on it."""
        if self._socket is not None:
            self._loop.remove_reader(_option(self._socket, zmq.FD))
            self._socket.close(0)
        identity = f"{self.name}-{next(self._lives)}"
        self._unsent.clear()
        self._socket = connect_dealer(self._context, self._endpoints.api, identity, self._keys)
        self._loop.add_reader(_option(self._socket, zmq.FD), self._read)
        self._hello_at_s = time.monotonic()
        self._send(Hello(PROTOCOL_VERSION, Role.API, self.name, os.getpid()))

    def _lose(self, reason: str) -> None:
        """The scheduler is gone: fail everything now, then say hello again."""
        assert self._welcome is not None
        _log.warning(log.event("engine.lost", reason=reason, open=len(self._calls)))
        self._welcome = None
        self._forget_exit_fd()
        self.state = _away(Phase.DEAD, reason)
        self.fail_all(reason)
        self._connect()

    def _check(self) -> None:
        """Every CHECK_S: what no message tells."""
        now_s = time.monotonic()
        if self._welcome is None:
            if now_s - self._hello_at_s > HELLO_AGAIN_S:
                self._connect()
        elif now_s - self._welcomed_at_s > LOST_S and self._beats.is_lost(now_s):
            self._lose(f"no heartbeat of the scheduler for {LOST_S:g} s")
        elif self._is_other_life():
            self._lose("the scheduler was restarted")
        while self._unsent and self._send(self._unsent[0]):
            self._unsent.popleft()
        self._timer = self._loop.call_later(CHECK_S, self._check)

    def _is_other_life(self) -> bool:
        heard = self._beats.last
        assert self._welcome is not None
        return (
            heard is not None
            and heard.at_s > self._welcomed_at_s + CHECK_S
            and heard.beat.epoch != self._welcome.epoch
        )

    def _send(self, message: Message) -> bool:
        """False if the queue is full. Reading goes on after it: sending may eat the wake-up."""
        assert self._socket is not None
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        if _option(self._socket, zmq.EVENTS) & zmq.POLLIN:
            self._loop.call_soon(self._read)
        return True

    def _read(self) -> None:
        """All that is queued; the descriptor is edge-triggered, so until nothing is left."""
        for _ in range(MAX_MESSAGES_PER_TURN):
            if self._socket is None:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise WireError(f"{len(frames)} frames instead of 1")
                message = decode(frames[0])
            except WireError as error:
                self.num_malformed += 1
                _log.warning(log.event("wire.malformed", count=self.num_malformed, what=str(error)))
                continue
            self._take(message)
        self._loop.call_soon(self._read)

    def _take(self, message: Message) -> None:
        if isinstance(message, Tokens):
            for delta in message.deltas:
                call = self._calls.get(delta.request_id)
                if call is not None:
                    if delta.finish_reason is not None:
                        del self._calls[delta.request_id]
                    call.put_delta(delta)
        elif isinstance(message, Accepted):
            if (call := self._calls.get(message.request_id)) is not None:
                call.put_accepted(message)
        elif isinstance(message, Failed):
            if (call := self._calls.pop(message.request_id, None)) is not None:
                call.fail(_failed(message), message.request_id)
        elif isinstance(message, EngineState):
            self.state = message
        elif isinstance(message, Welcome):
            self._greet(message)
        elif isinstance(message, Refused):
            self._on_fatal(ProtocolError(f"the scheduler refused this api: {message.reason}"))
        else:
            _log.warning(log.event("wire.unexpected", message=type(message).__name__))

    def _greet(self, welcome: Welcome) -> None:
        is_same_life = self._welcome == welcome
        self._welcome = welcome
        self._welcomed_at_s = time.monotonic()
        for request_id in self._orphans:  # unknown to a new scheduler, which then ignores it
            self._unsent.append(Abort(request_id))
        self._orphans.clear()
        if is_same_life:
            return
        _log.info(log.event("engine.welcome", pid=welcome.pid, epoch=welcome.epoch))
        self._forget_exit_fd()
        if self._endpoints.api.startswith("ipc://"):
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


def _away(phase: Phase, detail: str) -> EngineState:
    return EngineState(phase, detail, 0, 0, 0, 0, 0, {})


def _lost(reason: str) -> RequestError:
    return RequestError(ErrorCode.ENGINE_UNAVAILABLE, reason)


def _failed(message: Failed) -> RequestError:
    try:
        code = ErrorCode(message.code)
    except ValueError:
        code = ErrorCode.STEP_FAILED
    return RequestError(
        code, message.message, param=message.param, retry_after_s=message.retry_after_s
    )
