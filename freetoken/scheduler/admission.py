"""The queue of waiting requests, its bounds, and how much room the running ones will likely want.

A request's place is the time it arrived, plus AGE_S for each step of priority (lower goes first):
so priorities age by themselves, and a preempted request returns to its old place. No I/O; the
clock is an argument.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from freetoken.errors import ErrorCode, RequestError
from freetoken.scheduler.fit import num_pages_for
from freetoken.scheduler.request import Request, State

AGE_S = 10.0
"""A request of priority p waits for those of priority 0 that come up to p times this later."""

RATE_S = 60.0
"""How far back the rate looks that Retry-After is computed from, and the longest Retry-After."""

MAX_PRIORITY = 60
"""Priorities beyond this, either way, count as this: so nobody is overtaken by what comes more than
2 * MAX_PRIORITY * AGE_S (20 minutes) later."""

FIRST_GUESS_TOKENS = 64
"""Likely output before any request has finished."""

LASTS = 4
"""An output that was preempted will likely go on for one part in so many of what there is: it
returns to that much room, however short the others are. (In simulated overload, a quarter of the
outputs long, that makes a sixth fewer preemptions.)"""


def place_of(arrived_s: float, priority: int) -> float:
    """Where a request stands in the queue; smaller goes first."""
    return arrived_s + max(-MAX_PRIORITY, min(MAX_PRIORITY, priority)) * AGE_S


class WaitQueue:
    """Waiting requests, oldest first. Those set aside to follow another count as waiting."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_requests = 0
        self.num_tokens = 0
        self._heap: list[tuple[float, int, Request]] = []  # by `order`
        self._empty_s = float("-inf")  # when a request last found nobody waiting
        self._ends: deque[tuple[float, int]] = deque(maxlen=1024)  # time, prompt tokens

    def check_room(self, num_tokens: int, now_s: float) -> None:
        """RequestError if another request of `num_tokens` would exceed the bounds."""
        if not self.num_requests:
            self._empty_s = now_s
        if self.num_requests >= self.max_requests:
            share = 1 / self.num_requests
            limit = f"{self.num_requests} requests are waiting, the limit is {self.max_requests}"
            remedy = "raise --max-queued-requests"
        elif self.num_requests and self.num_tokens + num_tokens > self.max_tokens:
            share = (self.num_tokens + num_tokens - self.max_tokens) / self.num_tokens
            limit = (
                f"{self.num_tokens} prompt tokens are waiting, {num_tokens} more exceed the limit "
                f"of {self.max_tokens}"
            )
            remedy = "raise --max-queued-tokens"
        else:
            return
        wait_s = self._retry_after_s(share, now_s)
        message = f"{limit}; try again in {wait_s:.0f} s or {remedy}"
        raise RequestError(ErrorCode.QUEUE_FULL, message, retry_after_s=wait_s)

    def note_finish(self, prompt_tokens: int, now_s: float) -> None:
        """A request of so many prompt tokens has run to its end: that is how fast we are."""
        self._ends.append((now_s, prompt_tokens))

    def _retry_after_s(self, share: float, now_s: float) -> float:
        """Whole seconds until `share` of the waiting tokens, and at least a tenth so that not all
        come back for one place, has moved on at the rate of the last minute; 1 to RATE_S.

        Only since somebody waits: idle time says nothing. While nothing has ended in that time,
        it may well take as long again.
        """
        begin_s = max(self._empty_s, now_s - RATE_S)
        while self._ends and self._ends[0][0] < begin_s:
            self._ends.popleft()
        span_s = now_s - max(begin_s, self._oldest_end_s())
        ended_tokens = sum(tokens for _, tokens in self._ends)
        wait_s = span_s
        if ended_tokens:
            wait_s *= max(share, 0.1) * self.num_tokens / ended_tokens
        return float(min(RATE_S, max(1, math.ceil(wait_s))))

    def _oldest_end_s(self) -> float:
        """Where the record begins if it is full, else the beginning of time."""
        is_full = len(self._ends) == self._ends.maxlen
        return self._ends[0][0] if is_full else float("-inf")

    # ------------------------------------------------------------ order

    def push(self, request: Request) -> None:
        self.num_requests += 1
        self.num_tokens += request.num_tokens
        self.bring_back(request)

    def head(self) -> Request | None:
        """The oldest waiting request; it stays."""
        while self._heap:
            request = self._heap[0][2]
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
        heappush(self._heap, (*request.order, request))
        if len(self._heap) > 64 + 2 * self.num_requests:
            self._heap = [entry for entry in self._heap if entry[2].state is State.WAITING]
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
            wanted = self._wanted(request, max(self._mean_tokens - request.num_output, page_size))
            pages += max(0, num_pages_for(wanted, page_size) - len(request.pages))
        return pages

    def entry_pages(self, request: Request, page_size: int) -> int:
        """All pages that `request`, which has none, should find when it gets a row."""
        num_output = request.num_output
        more = max(self._mean_tokens - num_output, num_output / LASTS, page_size)
        return num_pages_for(self._wanted(request, more), page_size)

    @staticmethod
    def _wanted(request: Request, more: float) -> int:
        return request.num_tokens + min(int(more), request.max_tokens - request.num_output)
