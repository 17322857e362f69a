"""Building one step: what the plan says, and what must be remembered until its result.

Called by the scheduler's `plan`; asks the pace whose turn it is, the roster for rows and pages.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace

from freetoken.scheduler.chunks import Deal, StepLimits, deal, in_pause
from freetoken.scheduler.node import TOKEN_BYTES
from freetoken.scheduler.pace import Account, Charge, Crowd, Pace
from freetoken.scheduler.passes import OpenPass
from freetoken.scheduler.request import PageCopy, Request, State
from freetoken.scheduler.roster import Roster
from freetoken.wire.messages import Extend, PageRun, RowStart, StepMode, StepPlan, pack_ids


@dataclass(slots=True)
class Step:
    """A step in flight. `extends` that end with it: request, kv_len after it, whether it samples.

    `part_of`: the pass of which it is a part. Only the last part has extends.
    """

    step_id: int
    planned_s: float = 0.0
    part_of: OpenPass | None = None
    layers: tuple[int, int] = (0, 0)
    charge: Charge | None = None
    extends: list[tuple[Request, int, bool]] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    sampled_rows: bytes = b""

    @property
    def mode(self) -> StepMode:
        return StepMode.ON_DEMAND if self.part_of is None else StepMode.PASS

    @property
    def is_last_part(self) -> bool:
        return self.part_of is not None and self.layers[1] == self.part_of.num_layers

    def extending(self) -> list[Request]:
        """The rows whose extends it computes, all or in part."""
        rows = self.extends if self.part_of is None else self.part_of.rows
        return [request for request, _, _ in rows]

    def requests(self) -> list[Request]:
        return [*self.extending(), *self.decodes]


class StepDraft:
    """Collects one step; `is_empty` until something is in it."""

    def __init__(self, step_id: int, now_s: float, limits: StepLimits, num_layers: int) -> None:
        self.step = Step(step_id, now_s)
        self._limits = limits
        self._num_layers = num_layers
        self._starts: list[RowStart] = []
        self._page_runs: list[PageRun] = []
        self._extends: list[Extend] = []
        self._sampled_rows = array("i")
        self._decode_rows = array("i")
        self._decode_positions = array("i")

    @property
    def is_empty(self) -> bool:
        return not self._extends and not self._decode_rows

    def fill(self, roster: Roster, pace: Pace) -> None:
        """An on-demand step or a part of a pass, whoever's turn it is and can use it."""
        opened = roster.open_pass
        account = None if opened is None or opened.is_stopped else opened.account
        rows, dealt = self._deal(roster, pace, is_paused=account is not None)
        crowd = Crowd(bool(roster.decoding), any(dealt.on_demand))
        may_pass = any(dealt.in_pass) if opened is None else account is not None
        if may_pass and pace.prefers_part(account, crowd):
            self._add_part(roster, pace, crowd)
            return
        if account is not None and not account.lets_newcomers_in(crowd):
            dealt = Deal([0] * len(rows), dealt.in_pass)
        self._add_on_demand(roster, pace, account, rows, dealt.on_demand)
        if self.is_empty and may_pass:
            self._add_part(roster, pace, Crowd(False, crowd.newcomers))

    def _deal(
        self, roster: Roster, pace: Pace, *, is_paused: bool = False
    ) -> tuple[list[Request], Deal]:
        """`is_paused`: between two parts of a pass."""
        rows = [row for row in roster.extending if not row.in_pass]
        limits = in_pause(self._limits) if is_paused else self._limits
        if rows and limits.max_on_demand_tokens is None:
            chunk = pace.chunk_tokens(bool(roster.decoding), limits.max_step_tokens)
            limits = replace(limits, max_step_tokens=chunk)
        return rows, deal([row.num_tokens - row.planned_len for row in rows], limits)

    # ------------------------------------------------------------ on demand

    def _add_on_demand(
        self,
        roster: Roster,
        pace: Pace,
        account: Account | None,
        rows: list[Request],
        chunks: list[int],
    ) -> None:
        self._add_decodes(roster)
        for row, chunk in zip(rows, chunks, strict=True):
            if chunk and row.state is State.EXTENDING:  # a decode may have preempted it
                end = self._add_extend(row, chunk)
                self.step.extends.append(end)
                if end[2]:
                    self._sampled_rows.append(row.row_id)
                    roster.planned_all(row)
        if not self.is_empty:
            self.step.charge = pace.charge_step(
                account,
                has_decodes=bool(self._decode_rows),
                num_extended=sum(len(extend.token_ids) for extend in self._extends) // TOKEN_BYTES,
            )

    # ------------------------------------------------------------ a pass

    def _add_part(self, roster: Roster, pace: Pace, crowd: Crowd) -> None:
        """The next layers of the open pass, or the first ones of a new one."""
        opened = roster.open_pass
        if opened is None:
            opened = self._begin_pass(roster, pace)
            if opened is None:
                return
        else:
            self._extends.extend(opened.extends)
        lo, account = opened.at, opened.account
        layers = account.part_layers(opened.num_layers - lo, crowd)
        opened.at = lo + layers
        opened.last_step = self.step.step_id
        self.step.part_of = opened
        self.step.layers = (lo, opened.at)
        self.step.charge = pace.charge_part(account, layers, crowd)
        for row, _, _ in opened.rows:
            row.last_step = self.step.step_id
        if self.step.is_last_part:
            self.step.extends.extend(opened.rows)
            self._sampled_rows.extend(row.row_id for row, _, is_last in opened.rows if is_last)
            roster.end_pass()

    def _begin_pass(self, roster: Roster, pace: Pace) -> OpenPass | None:
        """A pass of all rows that are not for on-demand steps; None if there is none any more."""
        rows, dealt = self._deal(roster, pace)
        ends = [
            self._add_extend(row, chunk)
            for row, chunk in zip(rows, dealt.in_pass, strict=True)
            if chunk
        ]
        if not ends:
            return None
        again = [Extend(e.row_id, e.cached_len, b"", e.is_last) for e in self._extends]
        opened = OpenPass(ends, again, self._num_layers, pace.new_account())
        roster.begin_pass(opened)
        return opened

    # ------------------------------------------------------------ rows

    def _add_extend(self, row: Request, chunk: int) -> tuple[Request, int, bool]:
        """The next `chunk` tokens of `row`; an entry of `Step.extends`."""
        if row.extend_planned_s is None:
            row.extend_planned_s = self.step.planned_s
            self._starts.append(row.start())
            self._page_runs.append(PageRun(row.row_id, 0, pack_ids(row.pages)))
            if row.copy is not None:
                self.step.copies.append(row.copy)
                row.copy = None
        first, end = row.planned_len, row.planned_len + chunk
        is_last = end == row.num_tokens
        token_ids = bytes(row.ids[first * TOKEN_BYTES : end * TOKEN_BYTES])
        self._extends.append(Extend(row.row_id, first, token_ids, is_last))
        row.planned_len = end
        row.last_step = self.step.step_id
        return row, end, is_last

    def _add_decodes(self, roster: Roster) -> None:
        """Every decoding row that has a token to make. This loop sees all rows: keep it small."""
        step_id = self.step.step_id
        decodes, positions = self.step.decodes, self._decode_positions
        for row in roster.decoding.copy():
            at = row.planned_len
            if at >= row.decode_limit and not self._add_page(roster, row):
                continue
            row.planned_len = at + 1
            row.last_step = step_id
            positions.append(at)
            decodes.append(row)
        self._decode_rows.extend([row.row_id for row in decodes])

    def _add_page(self, roster: Roster, row: Request) -> bool:
        """Make room for a row at its limit; False if it is at its end, preempted or must wait."""
        if (
            row.planned_len >= row.decode_end
            or row.state is not State.DECODING
            or not roster.make_room(row)
        ):
            return False
        first = len(row.pages) - 1
        self._page_runs.append(PageRun(row.row_id, first, pack_ids(row.pages[first:])))
        return True

    def finish(self, epoch: int, forget_rows: list[int]) -> StepPlan:
        """The message; `forget_rows` go with it."""
        step = self.step
        self._sampled_rows.extend(self._decode_rows)
        step.sampled_rows = pack_ids(self._sampled_rows)
        return StepPlan(
            step_id=step.step_id,
            epoch=epoch,
            mode=step.mode,
            forget_rows=pack_ids(forget_rows),
            page_copies=tuple((copy.source, copy.destination) for copy in step.copies),
            starts=tuple(self._starts),
            page_runs=tuple(self._page_runs),
            extends=tuple(self._extends),
            decode_rows=pack_ids(self._decode_rows),
            decode_positions=pack_ids(self._decode_positions),
            layers=step.layers,
        )
