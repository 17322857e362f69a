"""The queue of waiting requests, its bounds, and how much room the running ones will likely want.

A request's place is the time it arrived, less AGE_S for each step of priority: so priorities age
by themselves and a preempted request returns to its old place. No I/O; the clock is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from freetoken.errors import ErrorCode, RequestError
from freetoken.scheduler.fit import num_pages_for
from freetoken.scheduler.request import Request, State

AGE_S = 10.0
"""A request of priority p goes before those of priority 0 that came up to p times this earlier."""

FIRST_GUESS_TOKENS = 64
"""Likely output before any request has finished."""


class WaitQueue:
    """Waiting requests, oldest first. Those set aside to follow another count as waiting."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_requests = 0
        self.num_tokens = 0
        self._heap: list[tuple[tuple[float, int], Request]] = []
        self._finished_s: deque[float] = deque(maxlen=64)

    def check_room(self, num_tokens: int, now_s: float) -> None:
        """RequestError if another request of `num_tokens` would exceed the bounds."""
        if self.num_requests >= self.max_requests:
            limit = f"{self.num_requests} requests are waiting, the limit is {self.max_requests}"
            remedy = "raise --max-queued-requests"
        elif self.num_requests and self.num_tokens + num_tokens > self.max_tokens:
            limit = (
                f"{self.num_tokens} prompt tokens are waiting, {num_tokens} more exceed the limit "
                f"of {self.max_tokens}"
            )
            remedy = "raise --max-queued-tokens"
        else:
            return
        wait_s = self.retry_after_s(now_s)
        message = f"{limit}; try again in {wait_s:.0f} s or {remedy}"
        raise RequestError(ErrorCode.QUEUE_FULL, message, retry_after_s=wait_s)

    def note_finish(self, now_s: float) -> None:
        self._finished_s.append(now_s)

    def retry_after_s(self, now_s: float) -> float:
        """Whole seconds until a tenth of the queue has moved on, at the rate of late; 1 to 60."""
        if len(self._finished_s) < 2:
            return 1.0
        span_s = max(now_s - self._finished_s[0], 1e-3)
        wait_s = self.num_requests / 10 * span_s / len(self._finished_s)
        return float(min(60, max(1, round(wait_s))))

    # ------------------------------------------------------------ order

    def push(self, request: Request) -> None:
        self.num_requests += 1
        self.num_tokens += request.num_tokens
        self.bring_back(request)

    def head(self) -> Request | None:
        """The oldest waiting request; it stays."""
        while self._heap:
            request = self._heap[0][1]
            if request.state is State.WAITING:
                return request
            heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Take the head."""
        request = self.set_aside()
        self.discard(request)
        return request

    def set_aside(self) -> Request:
        """Take the head, which goes on waiting elsewhere."""
        request = self.head()
        assert request is not None
        heappop(self._heap)
        return request

    def bring_back(self, request: Request) -> None:
        """The inverse of `set_aside`."""
        request.state = State.WAITING
        heappush(self._heap, (request.order, request))
        if len(self._heap) > 64 + 2 * self.num_requests:
            self._heap = [entry for entry in self._heap if entry[1].state is State.WAITING]
            heapify(self._heap)

    def discard(self, request: Request) -> None:
        """`request` waits no more. Its entry, if it has one, goes when its turn comes: mark it."""
        self.num_requests -= 1
        self.num_tokens -= request.num_tokens


class LikelyOutput:
    """A running mean of how long outputs are."""

    def __init__(self) -> None:
        self._mean_tokens = float(FIRST_GUESS_TOKENS)

    def note(self, num_output: int) -> None:
        self._mean_tokens += (num_output - self._mean_tokens) / 16

    def most_pages(self, num_running: int, page_size: int) -> int:
        """At least what `headroom_pages` counts for so many rows, without a look at them."""
        more = int(max(self._mean_tokens, page_size))
        return num_running * (num_pages_for(more, page_size) + 1)

    def headroom_pages(self, running: Iterable[Request], page_size: int) -> int:
        """Pages that `running` will likely take beyond what they hold: not the worst case."""
        pages = 0
        for request in running:
            more = max(self._mean_tokens - request.num_output, page_size)
            more = min(int(more), request.max_tokens - request.num_output)
            wanted = num_pages_for(request.num_tokens + more, page_size)
            pages += max(0, wanted - len(request.pages))
        return pages
