"""What becomes of each request: one log line and its metrics, written when it has ended.

`Recorder` is the outermost middleware of ours. Plain ASGI: it sees every message of a stream and
adds no task or queue to it. Endpoints add to the `Record` of their request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from freetoken import log
from freetoken.api.metrics import Metrics

CLIENT_GONE = 499
"""In logs and metrics only: the client left before the answer ended (nginx's number)."""

_KEY = "freetoken.record"
_log = log.get(__name__)


@dataclass(slots=True)
class Record:
    """One request so far. `fields` go into its log line."""

    started_s: float = field(default_factory=time.monotonic)
    ttft_s: float | None = None
    fields: dict[str, object] = field(default_factory=dict)
    status: int | None = None  # None until the response has begun
    is_body_read: bool = False
    is_complete: bool = False  # the response was sent to its end

    def mark_first_token(self) -> None:
        """The first output arrived now (kept if it did before)."""
        if self.ttft_s is None:
            self.ttft_s = time.monotonic() - self.started_s


def record_of(scope: Scope) -> Record:
    """The record of the request with that scope."""
    record: Record = scope[_KEY]
    return record


class Recorder:
    """Counts each request and logs its `http.end`, once."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Sequence[Route]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes

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
        status = record.status if record.is_complete and record.status else CLIENT_GONE
        duration_s = time.monotonic() - record.started_s
        self._metrics.observe(self._label(scope), status, duration_s, record.ttft_s)
        fields = {**record.fields, "status": status, "ms": duration_s * 1000}
        if record.ttft_s is not None:
            fields["ttft_ms"] = record.ttft_s * 1000
        # The scheduler logs the end of what it has accepted: one line a request is enough.
        is_told = status == HTTPStatus.OK or scope["method"] != "POST"
        level = logging.DEBUG if is_told else logging.INFO
        _log.log(level, log.event("http.end", path=scope["path"], **fields))

    def _label(self, scope: Scope) -> str:
        """The route's path: a closed set whatever clients ask for."""
        matching = (route for route in self._routes if route.matches(scope)[0] is not Match.NONE)
        return next((route.path_format for route in matching), "other")
