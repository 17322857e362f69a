"""Launches step plans: forget rows, copy pages, start rows, add pages, forward, sample.

Owns the rows, the page table, the KV pools and the sampler; knows no sockets. `launch` takes one
plan after another and settles all that does not depend on token values, so on a GPU the next plan
can be launched while the device computes this one. Steps are finished in the order of their launch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from freetoken.model.context import KvPools
from freetoken.wire.messages import StepMode, StepPlan, StepResult, StepStats
from freetoken.worker.direct import DirectSteps
from freetoken.worker.faults import PieceSize, StepError, give_back_memory, memory_message
from freetoken.worker.graphs import Enqueued, StepGraphs
from freetoken.worker.kv import copy_pages
from freetoken.worker.model import Counters, Model
from freetoken.worker.observe import StepObserver
from freetoken.worker.passes import PassSteps
from freetoken.worker.pending import (
    NOBODY,
    NOTHING,
    Computed,
    Drawn,
    Failed,
    Launched,
    Pending,
    collect,
    deal,
    read,
    samples_in,
)
from freetoken.worker.rows import Ids, Rows, unpack
from freetoken.worker.sampler import Sampler
from freetoken.worker.threads import StepThreads


@dataclass(frozen=True, slots=True)
class Limits:
    """What the memory plan allows; as announced in WorkerReady.

    max_step_tokens: extend tokens of an on-demand step · chunk_tokens: of a pass that go through a
    layer at a time.
    """

    max_rows: int
    num_pages: int
    page_size: int
    context_tokens: int
    vocab_size: int
    max_step_tokens: int
    chunk_tokens: int
    max_pass_tokens: int
    max_on_demand_tokens: int | None

    @property
    def max_tokens(self) -> int:
        """In an on-demand step, decode rows included."""
        return self.max_step_tokens + self.max_rows


class Runner:
    """`threads`: for models on the CPU; None leaves torch's threads alone.
    `queues_steps`: on-demand steps are queued through StepGraphs, as on a GPU."""

    def __init__(
        self,
        model: Model,
        pools: KvPools,
        limits: Limits,
        threads: StepThreads | None = None,
        *,
        queues_steps: bool | None = None,
    ) -> None:
        self.limits = limits
        self._model = model
        self._pools = pools
        device = pools.k[0].device
        self._rows = rows = Rows(
            max_rows=limits.max_rows,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            context_tokens=limits.context_tokens,
            vocab_size=limits.vocab_size,
            device=device,
        )
        self._sampler = sampler = Sampler(limits.max_rows, limits.vocab_size, device)
        piece = PieceSize(limits.max_tokens)
        self._passes = PassSteps(model, pools, rows, PieceSize(limits.chunk_tokens), threads)
        self._direct = DirectSteps(model, pools, rows, sampler, piece, threads)
        self.graphs: StepGraphs | None = None
        if device.type == "cuda" if queues_steps is None else queues_steps:
            self.graphs = StepGraphs(
                model,
                pools,
                rows,
                sampler,
                piece,
                max_tokens=limits.max_tokens,
                vocab_size=limits.vocab_size,
            )
        self.observer: StepObserver | None = None
        self._in_flight: deque[Launched] = deque()
        self._finished_s = 0.0

    @property
    def max_on_demand_tokens(self) -> int | None:
        """By the limits, or as refreshed from the steps that were observed."""
        if self.observer is not None:
            return self.observer.max_on_demand_tokens
        return self.limits.max_on_demand_tokens

    def capture(self, report: Callable[[int, int], None]) -> None:
        """Record CUDA graphs of on-demand steps; report(done, total)."""
        assert self.graphs is not None
        assert not self._in_flight
        self.graphs.capture(report)

    def forget_all(self) -> None:
        """The scheduler is gone, and with it every row. No step may be in flight."""
        assert not self._in_flight
        self._forget(np.arange(self.limits.max_rows))

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. After a StepError its rows are void and the next plan may come."""
        return self.launch(plan).finish()

    def launch(self, plan: StepPlan) -> Pending:
        """Begin a step. What fails it is raised by `finish`; other exceptions end the process."""
        started_s = time.perf_counter()
        try:
            with torch.inference_mode():
                return self._launch(plan, started_s)
        except StepError as error:
            # Another one: tracebacks hold the tensors of what has failed.
            failed, is_short = StepError(str(error)), False
        except (RuntimeError, MemoryError) as error:
            message = memory_message(error)
            failed, is_short = StepError(f"out of memory outside the forward: {message}"), True
        if is_short:
            give_back_memory()
        self._fail(plan)
        return Failed(plan, failed)

    # ---- launch

    def _launch(self, plan: StepPlan, started_s: float) -> Pending:
        self._prepare(plan)
        if plan.mode is StepMode.PASS:
            return self._launch_pass(plan, started_s)
        if plan.layers != (0, 0):
            raise StepError(f"layers {plan.layers}: an on-demand step runs all layers")
        work = self._rows.check_work(plan, self.limits.max_step_tokens)
        row_ids = work.sampled_rows()
        if self._passes.is_open and self._passes.has_row_of(work.row_ids()):
            raise StepError("a row of the open pass stands in an on-demand step")
        if not work.num_tokens:
            return self._compute(plan, NOTHING, started_s)
        if self.graphs is None:
            sampled = self._direct.run(work)
            self._rows.advance(work, row_ids)
            return self._compute(plan, read(row_ids, sampled), started_s)
        parts = self.graphs.enqueue(work)
        self._rows.advance(work, row_ids)
        return self._put_in_flight(plan, parts, started_s)

    def _prepare(self, plan: StepPlan) -> None:
        rows = self._rows
        if plan.forget_rows:
            self._forget(unpack(plan.forget_rows, "forget_rows").astype(np.int64))
        rows.check_copies(plan.page_copies)
        copy_pages(self._pools, plan.page_copies)
        for start in plan.starts:
            rows.start(start.row_id)
            self._sampler.start(
                start.row_id, start.sampling, start.num_output, start.prompt_ids, start.output_ids
            )
        rows.add_pages(plan.page_runs)
        rows.pages.flush()

    def _launch_pass(self, plan: StepPlan, started_s: float) -> Pending:
        if plan.decode_rows:
            raise StepError("a pass takes no decode rows")
        lo, hi = self._passes.layers_of(plan)
        if lo == 0:
            work = self._rows.check_work(plan, self.limits.max_pass_tokens)
            if not work.num_tokens:
                return self._compute(plan, NOTHING, started_s)
            self._passes.begin(work)
        elif not self._passes.resume(plan, lo):
            return self._compute(plan, NOTHING, started_s)
        done = self._passes.advance(hi)
        row_ids, sampled = NOBODY, None
        if done is not None:
            work, logits = done
            row_ids = work.sampled_rows()
            if len(row_ids):
                sampled = self._sampler.sample(row_ids, logits)
            self._rows.advance(work, row_ids)
        if self.graphs is not None:
            parts = [self.graphs.enqueue_drawn(row_ids, sampled)]
            return self._put_in_flight(plan, parts, started_s)
        if sampled is None:
            return self._compute(plan, NOTHING, started_s)
        self._rows.keep_tokens(row_ids, sampled.tokens)
        return self._compute(plan, read(row_ids, sampled), started_s)

    def _compute(self, plan: StepPlan, drawn: Drawn, started_s: float) -> Pending:
        """A step that is done: on a CPU, or without a forward."""
        step_us = int((time.perf_counter() - started_s) * 1e6)
        if self.graphs is None:
            stats = _stats(step_us, self._model.take_counters())
        else:
            stats = StepStats(step_us)
        return Computed(plan, self._answer(plan, drawn, stats))

    def _put_in_flight(
        self,
        plan: StepPlan,
        parts: list[Enqueued],
        started_s: float,
    ) -> Pending:
        step = Launched(plan, parts, started_s, self._settle)
        self._in_flight.append(step)
        return step

    # ---- finish

    def _settle(self, step: Launched) -> StepResult:
        assert step is self._in_flight[0], "steps are finished in the order of their launch"
        self._in_flight.popleft()
        try:
            drawn, device_counters = collect(step)
        except StepError:
            named = self._fail(step.plan)
            for later in self._in_flight:
                later.void |= named
            raise
        now_s = time.perf_counter()
        step_us = int((now_s - max(step.started_s, self._finished_s)) * 1e6)
        self._finished_s = now_s
        stats = _stats(step_us, self._model.take_counters(device_counters.tolist()))
        if self.observer is not None:
            self.observer.note(step.plan, stats)
        return self._answer(step.plan, drawn, stats, step.void)

    def _answer(
        self, plan: StepPlan, drawn: Drawn, stats: StepStats, void: frozenset[int] = frozenset()
    ) -> StepResult:
        has_tokens = samples_in(plan, self._model.num_layers)
        row_ids, token_ids, logprobs = deal(plan, drawn, has_tokens=has_tokens, void=void)
        return StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            mode=plan.mode,
            row_ids=row_ids,
            token_ids=token_ids,
            logprobs=logprobs,
            stats=stats,
            max_on_demand_tokens=self.max_on_demand_tokens,
        )

    # ---- rows

    def _forget(self, row_ids: Ids) -> None:
        self._rows.forget(row_ids)
        for row_id in row_ids.tolist():
            self._sampler.forget(row_id)
        if self._passes.has_row_of(row_ids.tolist()):
            left = set(self._passes.close()) - set(row_ids.tolist())
            self._rows.void(np.array(sorted(left), np.int64))

    def _fail(self, plan: StepPlan) -> frozenset[int]:
        """Every row that the plan names fails with it, and so does a pass that has one of them."""
        named = {start.row_id for start in plan.starts}
        named |= {extend.row_id for extend in plan.extends}
        named |= {run.row_id for run in plan.page_runs}
        named |= set(
            np.frombuffer(plan.decode_rows[: len(plan.decode_rows) // 4 * 4], "<i4").tolist()
        )
        if self._passes.has_row_of(named):
            named |= set(self._passes.close())
        self._rows.void(np.array(sorted(named), np.int64))
        return frozenset(named)


def _stats(step_us: int, counters: Counters) -> StepStats:
    return StepStats(
        step_us=step_us,
        expert_bytes=counters.expert_bytes,
        slot_hits=counters.slot_hits,
        slot_misses=counters.slot_misses,
        distinct_experts=counters.distinct_experts,
    )
