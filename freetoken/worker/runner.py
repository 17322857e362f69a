"""Executes step plans: forget rows, copy pages, start rows, add pages, forward, sample.

Owns the rows, the page table, the KV pools and the sampler; knows no sockets. The process loop
calls `execute` for one plan after another. A step that runs out of memory is computed again in
smaller pieces, and later steps stay in pieces of that size.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from freetoken import log
from freetoken.model.context import KvPools, StepContext
from freetoken.wire.messages import (
    Logprobs,
    StepMode,
    StepPlan,
    StepResult,
    StepStats,
    pack_ids,
    unpack_ids,
)
from freetoken.worker.batch import assemble, split
from freetoken.worker.faults import StepError, is_out_of_memory
from freetoken.worker.kv import copy_pages
from freetoken.worker.rows import Ids, Rows, Work, unpack
from freetoken.worker.sampler import Sampler
from freetoken.worker.threads import StepThreads

VOID_TOKEN = 0
"""Stands in a result for a void row, whose place the scheduler counts and whose token it drops."""

MIN_PIECE_TOKENS = 16
"""A piece this small that still runs out of memory fails its step."""

_log = log.get(__name__)


class Counters(Protocol):
    """What experts cost since the last call of `take_counters`."""

    @property
    def slot_hits(self) -> int: ...
    @property
    def slot_misses(self) -> int: ...
    @property
    def expert_bytes(self) -> int: ...
    @property
    def distinct_experts(self) -> int: ...


class Model(Protocol):
    """What the runner needs of a loaded model (model.served.ServedModel, or a test's fake)."""

    def forward(self, ids: Tensor, context: StepContext, logits_at: Tensor) -> Tensor: ...

    def forward_pass(
        self, ids: Tensor, context: StepContext, logits_at: Tensor, chunk_tokens: int
    ) -> Tensor: ...

    def take_counters(self) -> Counters: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What the memory plan allows; as announced in WorkerReady."""

    max_rows: int
    num_pages: int
    page_size: int
    context_tokens: int
    vocab_size: int
    max_step_tokens: int
    max_pass_tokens: int
    max_on_demand_tokens: int | None


_Dealt = tuple[bytes, list[int], tuple[Logprobs | None, ...]]
"""Packed row ids, tokens, and logprobs (or none at all), in the order of the plan."""


class Runner:
    def __init__(
        self, model: Model, pools: KvPools, limits: Limits, threads: StepThreads | None = None
    ) -> None:
        """`threads`: for models on the CPU; None leaves torch's threads alone."""
        self.limits = limits
        self._threads = threads
        self._model = model
        self._pools = pools
        device = pools.k[0].device
        self._rows = Rows(
            max_rows=limits.max_rows,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            context_tokens=limits.context_tokens,
            vocab_size=limits.vocab_size,
            device=device,
        )
        self._sampler = Sampler(limits.max_rows, limits.vocab_size, device)
        self._piece_tokens = limits.max_step_tokens + limits.max_rows

    def forget_all(self) -> None:
        """The scheduler is gone, and with it every row."""
        self._forget(np.arange(self.limits.max_rows))

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. After a StepError its rows are void and the next plan may come."""
        started_s = time.perf_counter()
        try:
            with torch.inference_mode():
                row_ids, token_ids, logprobs = self._execute(plan)
        except StepError:
            self._void(plan)
            raise
        except (RuntimeError, MemoryError) as error:
            self._void(plan)
            if not is_out_of_memory(error):
                raise
            raise StepError(f"out of memory outside the forward: {error}") from error
        counters = self._model.take_counters()
        return StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            mode=plan.mode,
            row_ids=row_ids,
            token_ids=pack_ids(token_ids),
            logprobs=logprobs,
            stats=StepStats(
                step_us=int((time.perf_counter() - started_s) * 1e6),
                expert_bytes=counters.expert_bytes,
                slot_hits=counters.slot_hits,
                slot_misses=counters.slot_misses,
                distinct_experts=counters.distinct_experts,
            ),
            max_on_demand_tokens=self.limits.max_on_demand_tokens,
        )

    def _execute(self, plan: StepPlan) -> _Dealt:
        rows = self._rows
        self._forget(unpack(plan.forget_rows, "forget_rows").astype(np.int64))
        rows.check_copies(plan.page_copies)
        copy_pages(self._pools, plan.page_copies)
        for start in plan.starts:
            rows.start(start.row_id)
            self._sampler.start(
                start.row_id, start.sampling, start.num_output, start.prompt_ids, start.output_ids
            )
        rows.add_pages(plan.page_runs)
        work = rows.check_work(plan, self._max_tokens(plan))
        row_ids = work.sampled_rows()
        if not work.num_tokens:
            return _fill_void(plan, row_ids, [], ())
        started_s = time.perf_counter()
        if self._threads is not None:
            self._threads.use_for(work.num_tokens, started_s)
        logits = self._forward(work, plan.mode)
        if self._threads is not None:
            self._note_time(self._threads, work.num_tokens, started_s)
        sampled = self._sampler.sample(row_ids, logits)
        rows.advance(work, row_ids, sampled.tokens)
        return _fill_void(plan, row_ids, sampled.tokens.tolist(), sampled.logprobs)

    def _note_time(self, threads: StepThreads, num_tokens: int, started_s: float) -> None:
        now_s = time.perf_counter()
        if threads.note(num_tokens, now_s - started_s, now_s):
            _log.warning(
                log.event("step.slow", ms=(now_s - started_s) * 1000, threads=threads.num_narrow)
                + "; other processes use the cores"
            )

    def _max_tokens(self, plan: StepPlan) -> int:
        if plan.layers != (0, 0):
            raise StepError(f"layers {plan.layers}: this worker runs all layers in one step")
        if plan.mode is StepMode.ON_DEMAND:
            return self.limits.max_step_tokens
        if plan.decode_rows:
            raise StepError("a pass takes no decode rows")
        return self.limits.max_pass_tokens

    def _forward(self, work: Work, mode: StepMode) -> Tensor:
        """[n, V] f32 logits of the sampled rows, in smaller pieces until they fit in memory."""
        while True:
            try:
                return self._forward_in(work, mode, self._piece_tokens)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                message = str(error)
            # Outside the handler: the traceback held the tensors of the failed forward.
            tried = min(self._piece_tokens, work.num_tokens)
            if tried <= MIN_PIECE_TOKENS:
                raise StepError(f"out of memory with {tried} tokens at a time: {message}")
            self._piece_tokens = max(MIN_PIECE_TOKENS, tried // 2)
            if self._rows.last_tokens.is_cuda:
                torch.cuda.empty_cache()
            _log.warning(
                log.event(
                    "step.out_of_memory",
                    tokens=work.num_tokens,
                    piece=self._piece_tokens,
                    error=message,
                )
            )

    def _forward_in(self, work: Work, mode: StepMode, max_tokens: int) -> Tensor:
        if mode is StepMode.PASS:
            batch = assemble(work, self._rows, self._pools)
            return self._model.forward_pass(batch.ids, batch.context, batch.logits_at, max_tokens)
        if work.num_tokens <= max_tokens:
            batch = assemble(work, self._rows, self._pools)
            return self._model.forward(batch.ids, batch.context, batch.logits_at)
        found: dict[int, Tensor] = {}
        for piece in split(work, max_tokens):
            batch = assemble(piece, self._rows, self._pools)
            logits = self._model.forward(batch.ids, batch.context, batch.logits_at)
            found.update(zip(piece.sampled_rows().tolist(), logits, strict=True))
        return torch.stack([found[row] for row in work.sampled_rows().tolist()])

    def _forget(self, row_ids: Ids) -> None:
        self._rows.forget(row_ids)
        for row_id in row_ids.tolist():
            self._sampler.forget(row_id)

    def _void(self, plan: StepPlan) -> None:
        """Every row that the plan names fails with it."""
        named = [start.row_id for start in plan.starts]
        named += [extend.row_id for extend in plan.extends]
        named += [run.row_id for run in plan.page_runs]
        decode = np.frombuffer(plan.decode_rows[: len(plan.decode_rows) // 4 * 4], "<i4")
        self._rows.void(np.array(named + decode.tolist(), np.int64))


def _fill_void(
    plan: StepPlan, row_ids: Ids, tokens: list[int], logprobs: tuple[Logprobs | None, ...]
) -> _Dealt:
    """A place in the result for each row that the plan samples, void or not."""
    planned = pack_ids(extend.row_id for extend in plan.extends if extend.is_last)
    planned += plan.decode_rows
    if len(planned) == 4 * len(row_ids):
        return planned, tokens, logprobs
    found = dict(zip(row_ids.tolist(), tokens, strict=True))
    named = dict(zip(row_ids.tolist(), logprobs, strict=False))
    rows = unpack_ids(planned)
    filled = tuple(named.get(row) for row in rows) if logprobs else ()
    return planned, [found.get(row, VOID_TOKEN) for row in rows], filled
