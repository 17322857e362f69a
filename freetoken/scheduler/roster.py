"""The roster: every open request and where it stands: waiting, following, running or leaving.

Decides who is admitted, who waits for another's prefix, and who is preempted. Called by the
scheduler; changes pages only through the ledger.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator

from freetoken.scheduler.admission import LikelyOutput, WaitQueue
from freetoken.scheduler.counters import Counters
from freetoken.scheduler.fit import Later, Never, Resource
from freetoken.scheduler.ledger import Ledger
from freetoken.scheduler.node import TOKEN_BYTES, common_bytes
from freetoken.scheduler.radix import Match
from freetoken.scheduler.request import Request, State


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
        self.forget_rows: list[int] = []
        self.done_step = -1  # the last step whose result or failure is known
        self._counters = counters
        self._blocked: tuple[Request, int] | None = None

    @property
    def num_running(self) -> int:
        return len(self.extending) + len(self.decoding)

    def running(self) -> Iterator[Request]:
        yield from self.extending
        yield from self.decoding

    # ------------------------------------------------------------ admission

    def admit(self) -> None:
        """Seat waiting requests, oldest first, while they fit. Nobody overtakes the oldest."""
        headroom: int | None = None  # pages that the rows will likely take; computed once
        while self.ledger.num_free_rows and (head := self.queue.head()) is not None:
            if self._is_still_blocked(head):
                return
            match = self.ledger.match(head)
            leader = self._leader(head, match)
            if leader is not None:
                leader.followers.append(self.queue.set_aside())
                head.state = State.FOLLOWING
                continue
            if headroom is None:
                headroom = self._headroom(self.running())
            if not self._seat(head, match, headroom):
                return
            headroom += self._headroom([head])

    def _headroom(self, rows: Iterable[Request]) -> int:
        return self.likely.headroom_pages(rows, self.ledger.page_size)

    def _seat(self, head: Request, match: Match, headroom: int) -> bool:
        """Rows that run keep `headroom`, and `head` gets some itself; alone it needs none."""
        if self.num_running or self.leaving:
            headroom += self._headroom([head]) - self.ledger.need(head.num_tokens).num_pages
        verdict = self.ledger.seat(head, match, headroom)
        assert not isinstance(verdict, Never), "submit accepted what can never fit"
        if isinstance(verdict, Later):
            assert verdict.resource is Resource.PAGES
            self._blocked = (head, self.ledger.num_available)
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

    def lead(self, row: Request) -> None:
        """Bring back the followers of `row` that have nothing more to wait for."""
        stay = []
        for follower in row.followers:
            if follower.state is not State.FOLLOWING:
                continue
            shared = common_bytes(row.ids, follower.ids[:-TOKEN_BYTES]) // TOKEN_BYTES
            whole = shared - shared % self.ledger.page_size
            waits = row in self.computing and not row.is_private and row.kv_len < whole
            if waits:
                stay.append(follower)
            else:
                self.queue.bring_back(follower)
        row.followers = stay

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
        the younger ones are all spared. Those get their token soon: it needs no further page.
        """
        while not self.ledger.add_page(request):
            if self.leaving or self.ledger.num_copies:
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
        """Who makes room for `request`: the youngest that is not spared, never an older one."""
        younger = [row for row in self.running() if row.order > request.order]
        if younger:
            return max((row for row in younger if not row.is_spared), key=_order, default=None)
        assert self.num_running > 1, "a row alone does not fit"
        return None if request.is_spared else request

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
        if request.last_step <= self.done_step:
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
            self._let_go(request)

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
        self.ledger.check([*self.running(), *self.leaving])


def _order(request: Request) -> tuple[float, int]:
    return request.order
