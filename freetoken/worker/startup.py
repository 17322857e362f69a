"""From options to a runner that is ready: memory plan, self-check, load, warm-up.

Each stage is reported through Progress. What cannot work is refused before anything is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec
import torch

from freetoken import log
from freetoken.config import Config
from freetoken.errors import ConfigError
from freetoken.model.context import KvPools
from freetoken.model.heap import trim_heap
from freetoken.wire.messages import (
    Extend,
    PageRun,
    Phase,
    RowStart,
    Sampling,
    StepMode,
    StepPlan,
    WorkerReady,
    pack_ids,
)
from freetoken.worker.kv import pool_bytes
from freetoken.worker.link import Progress
from freetoken.worker.memory import MemoryPlan, plan_memory
from freetoken.worker.model import Model
from freetoken.worker.runner import Limits, Runner
from freetoken.worker.sizes import ModelSizes, make_request
from freetoken.worker.threads import StepThreads
from freetoken.worker.threshold import on_demand_tokens

ExpertsMode = Literal["in-place", "slots"]
ReportBytes = Callable[[str, int, int], None]

_log = log.get(__name__)


class ModelSource(Protocol):
    """Where the model comes from: a checkpoint, or a test's fake."""

    def read_sizes(self) -> ModelSizes:
        """From the configuration alone."""
        ...

    def find_banks(self, experts: ExpertsMode) -> int:
        """Bytes of banks that an earlier worker left and `load` will use; 0: none."""
        ...

    def check(self, experts: ExpertsMode) -> None:
        """EngineError if a small copy of the model computes something wrong on our path."""
        ...

    def load(
        self,
        experts: ExpertsMode,
        num_slots: int | None,
        context_tokens: int,
        report: ReportBytes,
    ) -> Model:
        """`context_tokens`: the longest request that will be served."""
        ...

    def make_pools(self, num_pages: int, page_size: int) -> KvPools: ...


@dataclass(frozen=True, slots=True)
class Started:
    """A runner, and what to announce of it: all but the epoch."""

    runner: Runner
    ready: WorkerReady


def start(config: Config, source: ModelSource, progress: Progress, budget_bytes: int) -> Started:
    """Everything before serving. Raises ConfigError or EngineError with the reason."""
    sizes = source.read_sizes()
    experts = choose_experts(config)
    request = make_request(config, sizes, has_slots=experts == "slots")
    budget_bytes += source.find_banks(experts)  # they are not free, but ours
    plan = plan_memory(sizes, request, budget_bytes)
    log_plan(config, sizes, plan, experts)
    limits = make_limits(config, sizes, plan, experts)

    def report(detail: str, done: int, total: int) -> None:
        progress.detail, progress.done, progress.total = detail, done, total

    with _stage(progress, Phase.CHECKING, "checking the model's class against transformers"):
        source.check(experts)
    with _stage(progress, Phase.LOADING, "loading weights"):
        slots = plan.num_slots if experts == "slots" else None
        model = source.load(experts, slots, plan.context_tokens, report)
        trim_heap()
    with _stage(progress, Phase.CHECKING, "warming up"):
        pools = source.make_pools(plan.num_pages, plan.page_size)
        assert pool_bytes(pools) == plan.prices["kv"]
        on_cpu = pools.k[0].device.type == "cpu"
        threads = StepThreads(torch.get_num_threads()) if on_cpu else None
        runner = Runner(model, pools, limits, threads)
        warm_up(runner, threads)
    ready = WorkerReady(
        epoch=0,
        model=Path(config.model or "").name,
        num_pages=plan.num_pages,
        page_size=plan.page_size,
        max_rows=limits.max_rows,
        window=plan.window,
        context_tokens=plan.context_tokens,
        vocab_size=limits.vocab_size,
        num_layers=model.num_layers,
        max_step_tokens=limits.max_step_tokens,
        max_pass_tokens=limits.max_pass_tokens,
        max_on_demand_tokens=limits.max_on_demand_tokens,
        plan=plan.prices,
    )
    return Started(runner, ready)


def choose_experts(config: Config) -> ExpertsMode:
    """`auto` is in place: on a CPU every expert is in reach. ConfigError for a threshold then."""
    if config.experts == "slots":
        return "slots"
    if config.extend_threshold != "auto":
        raise ConfigError(
            f"--extend-threshold {config.extend_threshold} is about expert slots, which need "
            "--experts slots"
        )
    return "in-place"


def make_limits(
    config: Config, sizes: ModelSizes, plan: MemoryPlan, experts: ExpertsMode
) -> Limits:
    has_slots = experts == "slots"
    return Limits(
        max_rows=config.max_rows,
        num_pages=plan.num_pages,
        page_size=plan.page_size,
        context_tokens=plan.context_tokens,
        vocab_size=sizes.vocab_size,
        max_step_tokens=plan.max_step_tokens,
        max_pass_tokens=plan.max_pass_tokens,
        max_on_demand_tokens=on_demand_tokens(
            config.extend_threshold, sizes.num_experts, sizes.top_k
        )
        if has_slots
        else None,
    )


def log_plan(config: Config, sizes: ModelSizes, plan: MemoryPlan, experts: ExpertsMode) -> None:
    """The three lines of the start: requested, resolved, effective."""
    flags = (
        "context_tokens num_tokens num_pages kv_reserve_tokens max_seq_len_override "
        "moe_cache_size moe_cache_rate extend_threshold page_size max_rows max_step_tokens"
    )
    asked = {name: getattr(config, name) for name in flags.split()}
    given = {name: value for name, value in asked.items() if value is not None}
    _log.info(log.event("requested", experts=config.experts, **given))
    _log.info(
        log.event(
            "resolved",
            moe_cache_size=plan.num_slots,
            num_pages=plan.num_pages,
            page_size=plan.page_size,
            experts=experts,
            planned_mib=plan.planned_bytes >> 20,
            budget_mib=plan.budget_bytes >> 20,
            **{f"{name}_mib": size >> 20 for name, size in plan.prices.items()},
        )
    )
    line = (
        f"effective KV context: {plan.context_tokens} tokens (reserve {plan.reserve_tokens}, "
        f"window {plan.window}, resident experts {plan.resident_rate * 100:.0f} %)"
    )
    if plan.context_tokens < plan.window:
        _log.warning("%s; %s uses the whole window", line, whole_window_flag(config, plan))
    else:
        _log.info(line)


def whole_window_flag(config: Config, plan: MemoryPlan) -> str:
    """The option that lets one request use the whole window: the one that sizes the pool now."""
    pages = -(-plan.window // plan.page_size)
    if config.num_tokens is not None:
        return f"--num-tokens {pages * plan.page_size}"
    if config.num_pages is not None:
        return f"--num-pages {pages}"
    return f"--context-tokens {plan.window}"


def warm_up(runner: Runner, threads: StepThreads | None) -> None:
    """The largest extend and some decode steps: memory that is short shows now, not to a client,
    the first request pays for no first call, and `threads` are calibrated."""
    limits = runner.limits
    num_decodes = 1 + (0 if threads is None else threads.num_calibration_steps)
    tokens = max(1, min(limits.max_step_tokens, limits.context_tokens - num_decodes))
    pages = range(-(-limits.context_tokens // limits.page_size))
    extend = StepPlan(
        step_id=0,
        epoch=0,
        mode=StepMode.ON_DEMAND,
        forget_rows=b"",
        page_copies=(),
        starts=(RowStart(0, Sampling(temperature=0.0), 0, b"", b""),),
        page_runs=(PageRun(0, 0, pack_ids(pages)),),
        extends=(Extend(0, 0, pack_ids([0] * tokens), True),),
        decode_rows=b"",
        decode_positions=b"",
    )
    runner.execute(extend)
    free = range(tokens, limits.context_tokens)
    positions = iter(free)

    def time_decode_s() -> float:
        decode = msgspec.structs.replace(
            extend,
            starts=(),
            page_runs=(),
            extends=(),
            decode_rows=pack_ids([0]),
            decode_positions=pack_ids([next(positions)]),
        )
        started_s = time.perf_counter()
        runner.execute(decode)
        return time.perf_counter() - started_s

    if free:
        time_decode_s()
    if threads is not None and len(free) >= num_decodes:
        threads.calibrate(time_decode_s)
        _log.info(log.event("threads", narrow=threads.num_narrow, wide=threads.num_wide))
    runner.forget_all()


@contextmanager
def _stage(progress: Progress, phase: Phase, detail: str) -> Iterator[None]:
    progress.phase, progress.detail, progress.done, progress.total = phase, detail, 0, 0
    started_s = time.monotonic()
    yield
    _log.info(log.event(f"{phase}.done", what=detail, seconds=time.monotonic() - started_s))
