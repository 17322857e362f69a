"""The open requests of one life of the worker, and their ends: finished, aborted or failed.

An end is final for the client at once; row and pages follow when the last step is back (roster).
"""

from __future__ import annotations

from collections.abc import Iterator

from freetoken.errors import RequestError
from freetoken.log import Journal
from freetoken.scheduler.counters import Counters
from freetoken.scheduler.request import Request, State
from freetoken.scheduler.roster import Roster
from freetoken.wire.messages import Failed, FinishReason


class OpenRequests:
    def __init__(self, roster: Roster, counters: Counters, journal: Journal) -> None:
        self._roster = roster
        self._counters = counters
        self._journal = journal
        self._by_id: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._by_id.values()))

    def get(self, request_id: str) -> Request | None:
        return self._by_id.get(request_id)

    def add(self, request: Request) -> None:
        self._by_id[request.id] = request
        self._roster.queue.push(request)
        if request.api is not None:
            self._counters.requests += 1
            self._counters.prompt_tokens += request.prompt_tokens

    def end(self, request: Request, finish: FinishReason, now_s: float) -> None:
        """`request` ends well, or at its client's wish."""
        self._close(request, keeps=True)
        if request.api is None:
            return
        if finish is FinishReason.ABORT:
            self._counters.requests_aborted += 1
        else:
            self._counters.requests_finished += 1
            self._roster.likely.note(request.num_output)
            self._roster.queue.note_finish(request.prompt_tokens, now_s)
        self._note_end(request, finish, now_s)

    def fail(self, request: Request, error: RequestError, now_s: float) -> Failed | None:
        """`request` ends through no fault of its own; what it computed last is not trusted.

        None for the probe, which nobody waits for.
        """
        self._close(request, keeps=False)
        if request.api is None:
            return None
        self._counters.requests_failed += 1
        self._note_end(request, error.code, now_s)
        return Failed(request.id, error.code, error.message, error.param, error.retry_after_s)

    def _close(self, request: Request, keeps: bool) -> None:
        del self._by_id[request.id]
        if request.state in (State.WAITING, State.FOLLOWING):
            request.state = State.GONE
            self._roster.queue.discard(request)
        else:
            self._roster.dismiss(request, keeps=keeps)

    def _note_end(self, request: Request, finish: str, now_s: float) -> None:
        first_s = request.first_token_s
        self._journal.info(
            "request.end",
            id=request.id,
            prompt=request.prompt_tokens,
            cached=request.cached_tokens or 0,
            output=request.num_output,
            finish=finish,
            ttft_ms="-" if first_s is None else (first_s - request.arrived_s) * 1e3,
            ms=(now_s - request.arrived_s) * 1e3,
        )
