"""A `Call`: the sequences that one HTTP request has at the engine, and what came back for them.

The engine client puts messages in, one task takes them out. Everything happens on one event loop;
a waiting task is woken by a future, nothing is polled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from freetoken.wire.messages import Accepted, Submit, TokenDelta

Abort = Callable[[str], None]
"""Tells the engine, once, that nobody waits for a request id any more."""

Delta = tuple[int, TokenDelta]
"""Index of the sequence within its call, and its new tokens."""


class Call:
    """Sequences that are answered together. Ends when all did, or with the first that fails."""

    def __init__(self, submits: Sequence[Submit], abort: Abort) -> None:
        self.request_ids = tuple(submit.request_id for submit in submits)
        self._open = {request_id: index for index, request_id in enumerate(self.request_ids)}
        self._accepted: list[Accepted | None] = [None] * len(submits)
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._abort = abort
        self._waiter: asyncio.Future[None] | None = None

    # ---- the engine's side

    def put_accepted(self, message: Accepted) -> None:
        index = self._open.get(message.request_id)
        if index is not None:
            self._accepted[index] = message
            self._wake()

    def put_delta(self, delta: TokenDelta) -> None:
        index = self._open.get(delta.request_id)
        if index is None:
            return
        if delta.finish_reason is not None:
            del self._open[delta.request_id]
        self._deltas.append((index, delta))
        self._wake()

    def fail(self, error: Exception, request_id: str | None = None) -> None:
        """End the call with `error`; the sequences other than `request_id` are aborted."""
        if request_id is not None:
            self._open.pop(request_id, None)
        if self._error is None:
            self._error = error
        self.close()
        self._wake()

    # ---- the request's side

    async def accepted(self) -> list[Accepted]:
        """Wait until the engine has taken every sequence; raises what refused one."""
        while True:
            if self._error is not None:
                raise self._error
            accepted = [message for message in self._accepted if message is not None]
            if len(accepted) == len(self._accepted):
                return accepted
            await self._wait()

    async def deltas(self) -> list[Delta]:
        """All that came since the last call, at least one; empty once every sequence ended.

        Tokens that came before a failure are given out first; then the failure is raised.
        """
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if not self._open:
                return []
            await self._wait()
        deltas, self._deltas = self._deltas, []
        return deltas

    def stop(self, index: int) -> None:
        """Want no more of one sequence: aborted once, unless it ended by itself."""
        request_id = self.request_ids[index]
        if self._open.pop(request_id, None) is not None:
            self._abort(request_id)

    def close(self) -> None:
        """Want no more of any sequence."""
        for index in list(self._open.values()):
            self.stop(index)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
