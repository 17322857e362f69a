"""Steps that were launched and are not answered yet.

A launched step is queued on the device (or, on a CPU, computed already). What it does beside token
values was settled when it was launched; `finish` waits for the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from freetoken.wire.messages import Logprobs, StepMode, StepPlan, StepResult, pack_ids, unpack_ids
from freetoken.worker.faults import StepError
from freetoken.worker.graphs import Enqueued
from freetoken.worker.rows import Ids
from freetoken.worker.sampler import Sampled, nothing_to_draw

VOID_TOKEN = 0
"""Stands in a result for a void row, whose place the scheduler counts and whose token it drops."""

NOBODY: Ids = np.empty(0, np.int64)


class Pending(Protocol):
    """`finish` is called once, and for steps in the order of their launch."""

    @property
    def plan(self) -> StepPlan: ...

    def is_done(self) -> bool:
        """Whether `finish` returns without waiting. Raises what has broken the device's context."""
        ...

    def finish(self) -> StepResult:
        """The result. StepError: the step has failed, its rows are void, the next one may come."""
        ...


@dataclass(frozen=True, slots=True)
class Failed:
    """A step that could not be launched."""

    plan: StepPlan
    error: StepError

    def is_done(self) -> bool:
        return True

    def finish(self) -> StepResult:
        raise self.error


@dataclass(frozen=True, slots=True)
class Computed:
    """A step whose result is known."""

    plan: StepPlan
    result: StepResult

    def is_done(self) -> bool:
        return True

    def finish(self) -> StepResult:
        return self.result


@dataclass(slots=True)
class Launched:
    """A step on the device, in one or more parts of which the last ends last.

    void: rows that an earlier step took with it after this one was launched · settle: turns it into
    its result.
    """

    plan: StepPlan
    parts: list[Enqueued]
    started_s: float
    settle: Callable[[Launched], StepResult]
    void: frozenset[int] = frozenset()

    def is_done(self) -> bool:
        return self.parts[-1].is_done()

    def finish(self) -> StepResult:
        return self.settle(self)


@dataclass(frozen=True, slots=True)
class Drawn:
    """tokens: one for each of `row_ids` · logprobs: alike, or empty if no row asked."""

    row_ids: Ids
    tokens: Ids
    logprobs: tuple[Logprobs | None, ...]


NOTHING = Drawn(NOBODY, NOBODY, ())


def read(row_ids: Ids, sampled: Sampled) -> Drawn:
    """Of a step on the CPU."""
    logprobs = () if sampled.logprobs is None else sampled.logprobs.read()
    return Drawn(row_ids, sampled.tokens.numpy(), logprobs)


def collect(step: Launched) -> tuple[Drawn, Ids]:
    """(what the parts of a step have drawn, counters up to here); waits for the device.

    StepError, when all is read, if a row had nothing to draw from that is not void anyway.
    """
    read = [part.read() for part in step.parts]
    counters = read[-1][1]
    drawn = Drawn(
        np.concatenate([part.row_ids for part in step.parts]),
        np.concatenate([tokens for tokens, _ in read]),
        _join_logprobs(step.parts),
    )
    bad = drawn.row_ids[drawn.tokens < 0].tolist()
    if bad and not step.void.issuperset(bad):
        raise nothing_to_draw([row for row in bad if row not in step.void])
    return drawn, counters


def _join_logprobs(parts: list[Enqueued]) -> tuple[Logprobs | None, ...]:
    if all(part.logprobs is None for part in parts):
        return ()
    found: list[Logprobs | None] = []
    for part in parts:
        found += [None] * len(part.row_ids) if part.logprobs is None else part.logprobs.read()
    return tuple(found)


def deal(
    plan: StepPlan, drawn: Drawn, *, has_tokens: bool, void: frozenset[int] = frozenset()
) -> tuple[bytes, bytes, tuple[Logprobs | None, ...]]:
    """Row ids, token ids and logprobs of the result: a place for each row that the plan samples,
    void or not, in its order. Not `has_tokens`: a part of a pass that samples none."""
    if not has_tokens:
        return b"", b"", ()
    planned = pack_ids(extend.row_id for extend in plan.extends if extend.is_last)
    planned += plan.decode_rows
    if not void and drawn.row_ids.astype("<i4").tobytes() == planned:
        return planned, drawn.tokens.astype("<i4").tobytes(), drawn.logprobs
    tokens = dict(zip(drawn.row_ids.tolist(), drawn.tokens.tolist(), strict=True))
    named = dict(zip(drawn.row_ids.tolist(), drawn.logprobs, strict=False))
    rows = unpack_ids(planned)
    filled = tuple(named.get(row) for row in rows) if drawn.logprobs else ()
    ids = [VOID_TOKEN if row in void else tokens.get(row, VOID_TOKEN) for row in rows]
    return planned, pack_ids(ids), filled


def samples_in(plan: StepPlan, num_layers: int) -> bool:
    """Whether the plan's result has tokens: all but those of a pass that goes on."""
    return plan.mode is not StepMode.PASS or plan.layers == (0, 0) or plan.layers[1] == num_layers
