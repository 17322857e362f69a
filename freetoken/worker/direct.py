"""On-demand steps on a CPU: computed when launched, exactly as large as they are."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from freetoken import log
from freetoken.model.context import KvPools
from freetoken.worker.batch import assemble, split
from freetoken.worker.faults import PieceSize, memory_message
from freetoken.worker.model import Model
from freetoken.worker.rows import Rows, Work
from freetoken.worker.sampler import Sampled, Sampler
from freetoken.worker.threads import StepThreads

_log = log.get(__name__)


class DirectSteps:
    """`piece`: tokens computed at a time; it shrinks when memory is short.
    `threads`: None leaves torch's threads alone."""

    def __init__(
        self,
        model: Model,
        pools: KvPools,
        rows: Rows,
        sampler: Sampler,
        piece: PieceSize,
        threads: StepThreads | None,
    ) -> None:
        self._model = model
        self._pools = pools
        self._rows = rows
        self._sampler = sampler
        self._piece = piece
        self._threads = threads

    def run(self, work: Work) -> Sampled:
        """Tokens of the sampled rows; they are kept for the rows' next step."""
        row_ids = work.sampled_rows()
        started_s = time.perf_counter()
        if self._threads is not None:
            self._threads.use_for(work.num_tokens, started_s)
        logits = self._forward(work)
        if self._threads is not None:
            self._note_time(self._threads, work.num_tokens, started_s)
        sampled = self._sampler.sample(row_ids, logits)
        self._rows.keep_tokens(row_ids, sampled.tokens)
        return sampled

    def _note_time(self, threads: StepThreads, num_tokens: int, started_s: float) -> None:
        now_s = time.perf_counter()
        if threads.note(num_tokens, now_s - started_s, now_s):
            _log.warning(
                log.event("step.slow", ms=(now_s - started_s) * 1000, threads=threads.num_narrow)
                + "; other processes use the cores"
            )

    def _forward(self, work: Work) -> Tensor:
        """[n, V] f32 logits of the sampled rows, in smaller pieces until they fit in memory."""
        while True:
            try:
                return self._forward_in(work, self._piece.num_tokens)
            except (RuntimeError, MemoryError) as error:
                message = memory_message(error)
            self._piece.shrink(work.num_tokens, message)

    def _forward_in(self, work: Work, max_tokens: int) -> Tensor:
        if work.num_tokens <= max_tokens:
            return self._forward_one(work)
        found: dict[int, Tensor] = {}
        for piece in split(work, max_tokens):
            logits = self._forward_one(piece)
            found.update(zip(piece.sampled_rows().tolist(), logits, strict=True))
        return torch.stack([found[row] for row in work.sampled_rows().tolist()])

    def _forward_one(self, work: Work) -> Tensor:
        batch = assemble(work, self._rows, self._pools)
        return self._model.forward(batch.ids, batch.context, batch.logits_at)
