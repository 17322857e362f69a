"""The pass that is open, from its first part to its last (see wire.messages.StepPlan).

Between two parts the model waits before a layer, and on-demand steps of other rows run. When
memory runs out, the pass begins anew with smaller chunks: what it has written, it writes again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from freetoken.model.context import KvPools
from freetoken.wire.messages import StepPlan
from freetoken.worker.batch import Batch, assemble
from freetoken.worker.faults import PieceSize, StepError, memory_message
from freetoken.worker.model import Model, OpenPass
from freetoken.worker.rows import Rows, Work
from freetoken.worker.threads import StepThreads


@dataclass(slots=True)
class _Open:
    """`at`: the layer before which it waits."""

    work: Work
    batch: Batch
    forward: OpenPass
    at: int


class PassSteps:
    """At most one pass is open. `chunk`: the tokens that go through a layer at a time ·
    `threads`: None leaves torch's threads alone."""

    def __init__(
        self,
        model: Model,
        pools: KvPools,
        rows: Rows,
        chunk: PieceSize,
        threads: StepThreads | None,
    ) -> None:
        self._model = model
        self._pools = pools
        self._rows = rows
        self._chunk = chunk
        self._threads = threads
        self._open: _Open | None = None

    @property
    def is_open(self) -> bool:
        return self._open is not None

    def has_row_of(self, row_ids: Iterable[int]) -> bool:
        """Whether the open pass has any of these rows."""
        return self._open is not None and not self._row_ids().isdisjoint(row_ids)

    def close(self) -> list[int]:
        """Give up the open pass, if there is one; its rows."""
        if self._open is None:
            return []
        rows = sorted(self._row_ids())
        self._open.forward.close()
        self._open = None
        return rows

    def layers_of(self, plan: StepPlan) -> tuple[int, int]:
        """[lo, hi) of the plan's part; StepError if there are no such layers."""
        num_layers = self._model.num_layers
        lo, hi = plan.layers if plan.layers != (0, 0) else (0, num_layers)
        if not 0 <= lo < hi <= num_layers:
            raise StepError(f"layers [{lo}, {hi}) of a model that has {num_layers}")
        return lo, hi

    def begin(self, work: Work) -> None:
        """Open a pass; StepError if one is open."""
        if self._open is not None:
            raise StepError("a pass begins, but another one is open")
        batch = assemble(work, self._rows, self._pools)
        self._open = _Open(work, batch, self._start(batch), 0)

    def resume(self, plan: StepPlan, lo: int) -> bool:
        """Check that a part that begins at layer `lo` continues the open pass; False if all its
        rows are void."""
        extends = [extend for extend in plan.extends if self._rows.is_active(extend.row_id)]
        if plan.extends and not extends:
            return False
        if self._open is None:
            raise StepError(f"a pass is to go on at layer {lo}, but none is open")
        held = [(part.row_id, part.cached_len, part.is_last) for part in self._open.work.extends]
        named = [(extend.row_id, extend.cached_len, extend.is_last) for extend in extends]
        if held != named or any(extend.token_ids for extend in extends):
            raise StepError("a pass goes on with other rows or tokens than it began with")
        if lo != self._open.at:
            raise StepError(f"a pass waits before layer {self._open.at}, the plan says {lo}")
        return True

    def advance(self, hi: int) -> tuple[Work, Tensor] | None:
        """Run the layers before `hi`; after the last one, the work and its logits [n, V] f32."""
        opened = self._open
        assert opened is not None
        if self._threads is not None:
            self._threads.use_for(opened.work.num_tokens, time.perf_counter())
        while True:
            try:
                is_done = opened.forward.advance(hi - opened.at)
                break
            except (RuntimeError, MemoryError) as error:
                message = memory_message(error)
            opened.forward.close()
            self._chunk.shrink(opened.work.num_tokens, message)
            opened.forward, opened.at = self._start(opened.batch), 0
        opened.at = hi
        if hi < self._model.num_layers:
            return None
        assert is_done, "the model has more layers than it says"
        self._open = None
        return opened.work, opened.forward.logits()

    def _start(self, batch: Batch) -> OpenPass:
        return self._model.start_pass(
            batch.ids, batch.context, batch.logits_at, self._chunk.num_tokens
        )

    def _row_ids(self) -> set[int]:
        assert self._open is not None
        return {part.row_id for part in self._open.work.extends}
