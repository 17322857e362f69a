"""Building one step: what the plan says, and what must be remembered until its result.

Called by the scheduler's `plan`; asks the roster for rows and pages.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from freetoken.scheduler.chunks import StepLimits, deal
from freetoken.scheduler.node import TOKEN_BYTES
from freetoken.scheduler.request import PageCopy, Request, State
from freetoken.scheduler.roster import Roster
from freetoken.wire.messages import Extend, PageRun, RowStart, StepMode, StepPlan, pack_ids


@dataclass(slots=True)
class Step:
    """A step in flight. `extends`: request, kv_len after it, whether it samples."""

    step_id: int
    mode: StepMode = StepMode.ON_DEMAND
    planned_s: float = 0.0
    extends: list[tuple[Request, int, bool]] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    sampled_rows: bytes = b""

    def requests(self) -> list[Request]:
        return [*(request for request, _, _ in self.extends), *self.decodes]


class StepDraft:
    """Collects one step; `is_empty` until something is in it."""

    def __init__(self, step_id: int, now_s: float) -> None:
        self.step = Step(step_id, planned_s=now_s)
        self._starts: list[RowStart] = []
        self._page_runs: list[PageRun] = []
        self._extends: list[Extend] = []
        self._sampled_rows = array("i")
        self._decode_rows = array("i")
        self._decode_positions = array("i")

    @property
    def is_empty(self) -> bool:
        return not self._extends and not self._decode_rows

    def fill(self, roster: Roster, last_mode: StepMode, limits: StepLimits) -> None:
        """Deal the step's tokens among the rows that can use them."""
        has_decodes = bool(roster.decoding)
        while True:
            extending = list(roster.extending)
            remaining = [row.num_tokens - row.planned_len for row in extending]
            dealt = deal(remaining, has_decodes, last_mode, limits)
            self.step.mode = dealt.mode
            if dealt.with_decodes:
                self._add_decodes(roster)
            for row, chunk in zip(extending, dealt.chunks, strict=True):
                if chunk and row.state is State.EXTENDING:  # a decode may have preempted it
                    self._add_extend(roster, row, chunk)
            if not self.is_empty or not dealt.with_decodes or not has_decodes:
                return
            has_decodes = False  # none of them can go on now: is there a pass to run?

    def _add_extend(self, roster: Roster, row: Request, chunk: int) -> None:
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
        self.step.extends.append((row, end, is_last))
        row.planned_len = end
        row.last_step = self.step.step_id
        if is_last:
            self._sampled_rows.append(row.row_id)
            roster.planned_all(row)

    def _add_decodes(self, roster: Roster) -> None:
        """Every decoding row that has a token to make. This loop sees all rows: keep it small."""
        step_id = self.step.step_id
        rows, positions, decodes = self._decode_rows, self._decode_positions, self.step.decodes
        for row in list(roster.decoding):
            at = row.planned_len
            if at >= row.decode_limit and not self._add_page(roster, row):
                continue
            row.planned_len = at + 1
            row.last_step = step_id
            rows.append(row.row_id)
            positions.append(at)
            decodes.append(row)

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
        )
