"""What becomes of each request: one log line and its metrics, written when it has ended.

`Recorder` is the outermost middleware of ours. Plain ASGI: it sees every message of a stream and
adds no task or queue to it. Endpoints add to the `Record` of their request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from freetoken import log

CLIENT_GONE = 499
"""In logs and metrics only: the client left before the answer ended (nginx's number)."""

_KEY = "freetoken.record"
_log = log.get(__name__)


@dataclass(slots=True)
class Record:
    """One request so far. `fields` go into its log line."""

    started_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    fields: dict[str, object] = field(default_factory=dict)
    status: int | None = None  # None until the response has begun
    is_body_read: bool = False
    is_complete: bool = False  # the response was sent to its end

    def mark_first_token(self) -> None:
        """The first output arrived now (kept if it did before)."""
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()


def record_of(scope: Scope) -> Record:
    """The record of the request with that scope."""
    record: Record = scope[_KEY]
    return record


Observe = Callable[[Scope, int, Record, float], None]
"""Counts a request that ended: its scope, status, record, and the time in monotonic seconds."""


class Recorder:
    """Calls `observe` and logs `http.end` once for each request."""

    def __init__(self, app: ASGIApp, observe: Observe) -> None:
        self._app = app
        self._observe = observe

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = scope[_KEY] = Record()

        async def note_receive() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                record.is_body_read = not message.get("more_body", False)
            return message

        async def note_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            elif not message.get("more_body", False):
                record.is_complete = True
            await send(message)

        try:
            await self._app(scope, note_receive, note_send)
        except ClientDisconnect:
            pass  # nobody is left to answer
        finally:
            self._note(scope, record)

    def _note(self, scope: Scope, record: Record) -> None:
        now_s = time.monotonic()
        status = record.status if record.is_complete and record.status else CLIENT_GONE
        self._observe(scope, status, record, now_s)
        fields = dict(record.fields)
        fields["status"] = status
        fields["ms"] = (now_s - record.started_s) * 1000
        if record.first_token_s is not None:
            fields["ttft_ms"] = (record.first_token_s - record.started_s) * 1000
        if scope["method"] == "POST":
            _log.info(log.event("http.end", **fields))
        else:
            _log.debug(log.event("http.end", path=scope["path"], **fields))
