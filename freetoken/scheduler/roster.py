"""The roster: every open request and where it stands: waiting, following, running or leaving.

Decides who is admitted, who waits for another's prefix, and who is preempted. Called by the
scheduler; changes pages only through the ledger.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from freetoken.scheduler.admission import LikelyOutput, WaitQueue
from freetoken.scheduler.counters import Counters
from freetoken.scheduler.fit import Later, Never, Resource
from freetoken.scheduler.ledger import Ledger
from freetoken.scheduler.node import TOKEN_BYTES, common_bytes
from freetoken.scheduler.passes import OpenPass
from freetoken.scheduler.radix import Match
from freetoken.scheduler.request import Request, State

MAX_MOVES = 16
"""Waiting requests that one plan looks at beside those it admits: so thousands that share a prefix
cost a plan no more than a few do."""


class Roster:
    """`extending` rows have tokens to plan, oldest first; `computing` rows have prompt k/v that is
    not back yet; `decoding` rows are past their last chunk (planned or back)."""

    def __init__(
        self, ledger: Ledger, queue: WaitQueue, likely: LikelyOutput, counters: Counters
    ) -> None:
        self.ledger = ledger
        self.queue = queue
        self.likely = likely
        self.extending: list[Request] = []
        self.computing: list[Request] = []
        self.decoding: list[Request] = []
        self.leaving: list[Request] = []
        self.open_pass: OpenPass | None = None  # until its last part is planned, or it is over
        self.forget_rows: list[int] = []
        self.done_step = -1  # the last step whose result or failure is known
        self._counters = counters
        self._blocked: tuple[Request, int] | None = None
        self._returning: deque[Request] = deque()  # followers with nothing more to wait for

    @property
    def num_running(self) -> int:
        return len(self.extending) + len(self.decoding)

    def running(self) -> Iterator[Request]:
        yield from self.extending
        yield from self.decoding

    # ------------------------------------------------------------ admission

    def admit(self) -> None:
        """Seat waiting requests, oldest first, while they fit. Nobody overtakes the oldest."""
        self._return_followers()
        moves = MAX_MOVES
        # Pages that the rows will likely take: at most so many; counted only if that is too many.
        headroom = self.likely.most_pages(self.num_running, self.ledger.page_size)
        is_counted = False
        while self.ledger.num_free_rows and (head := self.queue.head()) is not None:
            if self._is_still_blocked(head):
                return
            match = self.ledger.match(head)
            leader = self._leader(head, match)
            if leader is not None:
                self._follow(leader, head)
                moves -= 1
                if not moves:
                    return
            elif self._seat(head, match, headroom):
                headroom += self._headroom([head])
            elif is_counted:
                self._blocked = (head, self.ledger.num_available)
                return
            else:
                headroom, is_counted = self._headroom(self.running()), True

    def _headroom(self, rows: Iterable[Request]) -> int:
        return self.likely.headroom_pages(rows, self.ledger.page_size)

    def _seat(self, head: Request, match: Match, headroom: int) -> bool:
        """Rows that run keep `headroom`, and `head` gets some itself; alone it needs none."""
        if self.num_running or self.leaving:
            wanted = self.likely.entry_pages(head, self.ledger.page_size)
            headroom += wanted - self.ledger.need(head.num_tokens).num_pages
        verdict = self.ledger.seat(head, match, headroom)
        assert not isinstance(verdict, Never), "submit accepted what can never fit"
        if isinstance(verdict, Later):
            assert verdict.resource is Resource.PAGES
            return False
        self.queue.pop()
        head.state = State.EXTENDING
        if head.cached_tokens is None:
            head.cached_tokens = head.cached_len
        insort(self.extending, head, key=_order)
        self.computing.append(head)
        return True

    def _is_still_blocked(self, head: Request) -> bool:
        """True if `head` did not fit and no page has come back since: do not match it again."""
        if self._blocked is None or not self.num_running:
            return False
        blocked, num_available = self._blocked
        return blocked is head and self.ledger.num_available <= num_available

    def _leader(self, request: Request, match: Match) -> Request | None:
        """A row that is computing at least one whole page that `request` could share beyond what
        is cached: waiting for it beats computing it twice."""
        if request.api is None:
            return None
        shared = (match.num_pages + 1) * self.ledger.page_size * TOKEN_BYTES
        if shared > len(request.ids) - TOKEN_BYTES:
            return None
        wanted = request.ids[:shared]
        for row in self.computing:
            if (
                not row.is_private
                and row.salt == request.salt
                and row.kv_len * TOKEN_BYTES < shared
                and row.ids.startswith(wanted)
            ):
                return row
        return None

    def _follow(self, leader: Request, head: Request) -> None:
        """`head` waits until `leader` has computed the whole pages that they share."""
        self.queue.set_aside()
        head.state = State.FOLLOWING
        shared = common_bytes(leader.ids, head.ids[:-TOKEN_BYTES]) // TOKEN_BYTES
        whole = shared - shared % self.ledger.page_size
        heappush(leader.followers, (whole, head.order, head))

    def lead(self, row: Request) -> None:
        """Those followers of `row` return that have nothing more to wait for."""
        followers = row.followers
        if row not in self.computing or row.is_private:
            self._returning.extend(follower for _, _, follower in followers)
            followers.clear()
        while followers and followers[0][0] <= row.kv_len:
            self._returning.append(heappop(followers)[2])

    def _return_followers(self) -> None:
        """Bring back some: thousands may have waited for the same prefix."""
        moves = MAX_MOVES
        while self._returning and moves:
            follower = self._returning.popleft()
            if follower.state is State.FOLLOWING:
                self.queue.bring_back(follower)
                moves -= 1

    # ------------------------------------------------------------ running

    def planned_all(self, request: Request) -> None:
        """The last chunk of `request` is planned: it decodes from the next step on."""
        self.extending.remove(request)
        self.decoding.append(request)
        request.state = State.DECODING

    def computed_all(self, request: Request) -> None:
        """The last chunk of `request` is back."""
        self.computing.remove(request)
        self.lead(request)

    def make_room(self, request: Request) -> bool:
        """One more page for a decoding row; preempts the youngest if need be.

        False: not in this step, because pages come back with a result, it was the youngest, or
        the younger ones are all spared or in the open pass. They get their token, and the pass
        ends, without further pages.
        """
        while not self.ledger.add_page(request):
            if self.ledger.num_copies or any(not row.in_pass for row in self.leaving):
                return False
            victim = self._victim(request)
            if victim is None:
                return False
            self._counters.preemptions += 1
            victim.output_at_preemption = victim.num_output
            self.dismiss(victim, requeues=True)
            if victim is request:
                return False
        return True

    def _victim(self, request: Request) -> Request | None:
        """Who makes room for `request`: the youngest that may be preempted, never an older one."""
        younger = [row for row in self.running() if row.order > request.order]
        if younger:
            may_go = (row for row in younger if not row.is_spared and not row.in_pass)
            return max(may_go, key=_order, default=None)
        assert self.num_running > 1, "a row alone does not fit"
        return None if request.is_spared else request

    # ------------------------------------------------------------ the open pass

    def begin_pass(self, opened: OpenPass) -> None:
        """Its first part is planned."""
        assert self.open_pass is None, "one pass at a time"
        self.open_pass = opened
        for request, _, _ in opened.rows:
            request.in_pass = True

    def end_pass(self) -> None:
        """The last part of the open pass is planned: its rows decode from the next step on."""
        opened = self.open_pass
        assert opened is not None
        self.open_pass = None
        for request, _, is_last in opened.rows:
            request.in_pass = False
            if is_last and request.state is State.EXTENDING:
                self.planned_all(request)

    def _stop_pass(self, opened: OpenPass) -> None:
        """Nobody waits for it: no part follows those in flight. The worker gives it up when it is
        told to forget the rows; before that no other pass may begin."""
        opened.is_stopped = True
        for request, _, _ in opened.rows:
            request.in_pass = False
            if request.last_step <= self.done_step:
                self._let_go(request)
        self._close_stopped()

    def _close_stopped(self) -> None:
        opened = self.open_pass
        if opened is not None and opened.is_stopped and opened.last_step <= self.done_step:
            self.open_pass = None

    # ------------------------------------------------------------ leaving

    def dismiss(self, request: Request, *, requeues: bool = False, keeps: bool = True) -> None:
        """Stop planning a running request; it leaves when its last planned step is back.

        May be called again while it is leaving, to change its mind.
        """
        if request.is_running:
            where = self.extending if request.state is State.EXTENDING else self.decoding
            where.remove(request)
            request.state = State.LEAVING
            request.decode_limit = 0
            self.leaving.append(request)
        assert request.state is State.LEAVING
        request.requeues = requeues
        request.is_void = not requeues
        request.keeps = request.keeps and keeps
        if request in self.computing and not requeues:
            self.computed_all(request)
        if request.in_pass:
            if self.open_pass is not None and self.open_pass.is_abandoned:
                self._stop_pass(self.open_pass)
        elif request.last_step <= self.done_step:
            self._let_go(request)

    def start_over(self, request: Request) -> None:
        """The worker has lost a row: back to the queue. What was computed for it last is not
        trusted, nor what steps in flight still say of it."""
        self.dismiss(request, requeues=True, keeps=False)
        request.is_void = True

    def step_done(self, step_id: int) -> None:
        """The result of `step_id` is known: those who waited for it leave."""
        self.done_step = step_id
        for request in [row for row in self.leaving if row.last_step <= step_id]:
            if not request.in_pass:
                self._let_go(request)
        self._close_stopped()

    def _let_go(self, request: Request) -> None:
        self.leaving.remove(request)
        if request in self.computing:
            self.computing.remove(request)
        self.forget_rows.append(self.ledger.leave(request, request.keeps))
        self.lead(request)
        if request.requeues:
            request.requeues = request.is_void = False
            request.keeps = True
            self.queue.push(request)
        else:
            request.state = State.GONE

    # ------------------------------------------------------------ accounting

    def check(self) -> None:
        """Assert that the lists agree with the states and every page has one holder."""
        assert all(row.state is State.EXTENDING for row in self.extending)
        assert all(row.state is State.DECODING for row in self.decoding)
        assert all(row.state is State.LEAVING for row in self.leaving)
        assert all(row in self.computing for row in self.extending)
        if self.open_pass is not None and not self.open_pass.is_stopped:
            self.open_pass.check()
            held = {request.id for request, _, _ in self.open_pass.rows}
        else:
            held = set()
        seated = [*self.running(), *self.leaving]
        assert {row.id for row in seated if row.in_pass} == held, "a row of the pass is lost"
        self.ledger.check([*self.running(), *self.leaving])


def _order(request: Request) -> tuple[float, int]:
    return request.order
