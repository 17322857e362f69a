"""The engine as the api sees it: requests out, tokens in, one `Call` for each HTTP request.

When the scheduler is lost every open call fails at once; what comes for a request that nobody waits
for any more is dropped. Everything happens on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

from freetoken import log
from freetoken.api.calls import Call
from freetoken.api.link import Link
from freetoken.errors import ErrorCode, RequestError
from freetoken.wire.messages import (
    Abort,
    Accepted,
    EngineState,
    Failed,
    Message,
    Phase,
    Submit,
    Tokens,
)
from freetoken.wire.sockets import CurveKeys, Endpoints

IDLE_POLL_S = 0.05

_SERVING = (Phase.READY, Phase.STALLED)
_log = log.get(__name__)


class EngineClient:
    """`state` is the scheduler's last word, or our own while it is away."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoints: Endpoints,
        on_fatal: Callable[[Exception], None],
        keys: CurveKeys | None = None,
    ) -> None:
        self.state = _away(Phase.STARTING, "waiting for the scheduler")
        self._link = Link(context, endpoints, self, keys)
        self._on_fatal = on_fatal
        self._calls: dict[str, Call] = {}
        self._refusal: str | None = None

    @property
    def num_open(self) -> int:
        """Sequences that the engine works on for us."""
        return len(self._calls)

    @property
    def num_malformed(self) -> int:
        """Frames that were no message, dropped."""
        return self._link.num_malformed

    @property
    def context_tokens(self) -> int | None:
        """What one request may use; None until the worker is ready."""
        return self.state.context_tokens or None

    def start(self) -> None:
        """Begin to talk, from within the running loop."""
        self._link.start()

    def stop(self) -> None:
        """Fail what is open, tell the scheduler, and let go of sockets and threads."""
        self.fail_all("the server is shutting down")
        self._link.stop()

    # ---- requests

    def submit(self, submits: Sequence[Submit]) -> Call:
        """Hand over the sequences of one HTTP request; ENGINE_UNAVAILABLE if nobody takes them."""
        if self._refusal is not None:
            raise _unavailable(self._refusal)
        if not self._link.is_up or self.state.phase not in _SERVING:
            raise _unavailable(self._describe_state())
        call = Call(submits, self._abort)
        for submit in submits:
            self._calls[submit.request_id] = call
            if not self._link.send(submit):
                del self._calls[submit.request_id]
                error = _unavailable("the scheduler does not read its queue")
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
            call.fail(_unavailable(reason))
        assert not self._calls

    def _abort(self, request_id: str) -> None:
        if self._calls.pop(request_id, None) is None:
            return  # it never got that far
        # If the link is down, the scheduler ends our requests when it hears our next hello.
        if self._link.is_up:
            self._link.send_surely(Abort(request_id))

    def _describe_state(self) -> str:
        state = self.state
        text = f"the engine is {state.phase.value}"
        if state.detail:
            text += f": {state.detail}"
        if state.total_bytes:
            text += f" ({state.loaded_bytes} of {state.total_bytes} bytes loaded)"
        return text

    # ---- the link's taker

    def take(self, message: Message) -> None:
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
        else:
            _log.warning(log.event("wire.unexpected", message=type(message).__name__))

    def lost(self, reason: str, given_up_pid: int) -> None:
        self.state = _away(Phase.DEAD, reason, given_up_pid)
        self.fail_all(reason)

    def fatal(self, error: Exception) -> None:
        self._on_fatal(error)


def _away(phase: Phase, detail: str, given_up_pid: int = 0) -> EngineState:
    return EngineState(phase, detail, 0, 0, 0, 0, 0, {}, given_up_pid)


def _unavailable(reason: str) -> RequestError:
    return RequestError(ErrorCode.ENGINE_UNAVAILABLE, reason)


def _failed(message: Failed) -> RequestError:
    try:
        code = ErrorCode(message.code)
    except ValueError:
        code = ErrorCode.STEP_FAILED
    return RequestError(
        code, message.message, param=message.param, retry_after_s=message.retry_after_s
    )
