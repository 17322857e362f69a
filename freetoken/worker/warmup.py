"""The first steps of a runner: memory that is short shows now, not to a client, and the first
request pays for no first call."""

from __future__ import annotations

import time
from collections.abc import Iterator

from freetoken import log
from freetoken.kernels.attention_ops import TILE_SIZES
from freetoken.wire.messages import (
    Extend,
    PageRun,
    RowStart,
    Sampling,
    StepMode,
    StepPlan,
    pack_ids,
)
from freetoken.worker.runner import Runner
from freetoken.worker.threads import StepThreads

PREFIX_TOKENS = 28
REST_TOKENS = 100
"""Neither is a multiple of what libraries or pages take at a time."""

_log = log.get(__name__)


def warm_up(runner: Runner, threads: StepThreads | None) -> None:
    """The largest extend on demand, decode steps (which calibrate `threads`), and where there are
    passes the largest chunk of one. Leaves no row."""
    limits = runner.limits
    num_decodes = 1 + (0 if threads is None else threads.num_calibration_steps)
    length = min(limits.max_step_tokens, limits.context_tokens - num_decodes)
    runner.execute(_extend(runner, 0, max(1, length), StepMode.ON_DEMAND))
    positions = iter(range(max(1, length), limits.context_tokens))
    _decode_s(runner, positions)
    if threads is not None and limits.context_tokens - length >= num_decodes:
        threads.calibrate(lambda: _decode_s(runner, positions))
        _log.info(log.event("threads", narrow=threads.num_narrow, wide=threads.num_wide))
    runner.forget_all()
    if runner.limits.max_on_demand_tokens is not None:
        length = min(limits.chunk_tokens, limits.max_pass_tokens, limits.context_tokens - 1)
        runner.execute(_extend(runner, 0, length, StepMode.PASS))
        runner.forget_all()


def warm_up_passes(runner: Runner) -> None:
    """What `warm_up`, which runs a first chunk, leaves out: a chunk that begins within a page, one
    that follows others, the shortest tile of attention, and a rest. Kernels are made, planned or
    loaded when they are first called, which a request would wait for. Leaves no row."""
    limits = runner.limits
    length = limits.chunk_tokens + REST_TOKENS
    if limits.chunk_tokens >= TILE_SIZES[-1]:
        length += limits.chunk_tokens + TILE_SIZES[-1]
    length = min(length, limits.max_pass_tokens, limits.context_tokens - 1 - PREFIX_TOKENS)
    if length > 0:
        runner.execute(_extend(runner, PREFIX_TOKENS, length, StepMode.PASS))
        runner.forget_all()


def _extend(runner: Runner, cached: int, length: int, mode: StepMode) -> StepPlan:
    """Of row 0, which has the pages of a whole context."""
    limits = runner.limits
    pages = pack_ids(range(-(-limits.context_tokens // limits.page_size)))
    return StepPlan(
        step_id=0,
        epoch=0,
        mode=mode,
        forget_rows=b"",
        page_copies=(),
        starts=(RowStart(0, Sampling(temperature=0.0), 0, b"", b""),),
        page_runs=(PageRun(0, 0, pages),),
        extends=(Extend(0, cached, pack_ids([0] * length), True),),
        decode_rows=b"",
        decode_positions=b"",
    )


def _decode_s(runner: Runner, positions: Iterator[int]) -> float:
    """Seconds of a decode step of row 0; nothing if its context is full."""
    position = next(positions, None)
    if position is None:
        return 0.0
    plan = StepPlan(
        step_id=0,
        epoch=0,
        mode=StepMode.ON_DEMAND,
        forget_rows=b"",
        page_copies=(),
        starts=(),
        page_runs=(),
        extends=(),
        decode_rows=pack_ids([0]),
        decode_positions=pack_ids([position]),
    )
    started_s = time.perf_counter()
    runner.execute(plan)
    return time.perf_counter() - started_s
