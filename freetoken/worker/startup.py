"""From options to a runner that is ready: memory plan, self-check, load, warm-up.

Each stage is reported through Progress. What cannot work is refused before anything is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from freetoken import log
from freetoken.config import Config
from freetoken.errors import ConfigError, EngineError
from freetoken.experts.cost import Link, Routed
from freetoken.model.heap import trim_heap
from freetoken.wire.messages import Phase, WorkerReady
from freetoken.worker.budget import measure_budget, measure_gpu_budget
from freetoken.worker.device import DeviceMemory, check_prices, find_spare
from freetoken.worker.faults import describe, is_out_of_memory
from freetoken.worker.kv import pool_bytes
from freetoken.worker.link import Progress
from freetoken.worker.link_speed import measure_link
from freetoken.worker.memory import MemoryPlan, plan_memory
from freetoken.worker.model import Model
from freetoken.worker.observe import StepObserver
from freetoken.worker.plan_log import context_flag, log_plan
from freetoken.worker.runner import Limits, Runner
from freetoken.worker.sizes import ModelSizes, make_request
from freetoken.worker.source import ExpertsMode, ModelSource
from freetoken.worker.threads import StepThreads
from freetoken.worker.threshold import Threshold, on_demand_tokens
from freetoken.worker.warmup import warm_up, warm_up_passes

LATER = ("graphs", "pass", "kv_reach", "sampling")
"""Prices of what the first steps do not take: they are of one row, whose chunk is its first."""

_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class Started:
    """A runner, and what to announce of it: all but the epoch."""

    runner: Runner
    ready: WorkerReady


@dataclass(frozen=True, slots=True)
class _Start:
    """What is decided before anything is loaded."""

    config: Config
    source: ModelSource
    progress: Progress
    sizes: ModelSizes
    experts: ExpertsMode
    plan: MemoryPlan

    @property
    def compiles(self) -> bool:
        return self.sizes.on_gpu and self.config.compile == "auto"

    def report(self, detail: str, done: int, total: int) -> None:
        self.progress.detail, self.progress.done, self.progress.total = detail, done, total

    @contextmanager
    def stage(self, phase: Phase, detail: str) -> Iterator[None]:
        """Reported and timed; EngineError if the GPU's memory runs out in it."""
        self.progress.phase = phase
        self.report(detail, 0, 0)
        started_s = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if not self.sizes.on_gpu or not is_out_of_memory(error):
                raise
            raise EngineError(
                f"the GPU's memory ran out while {self.progress.detail}: {error}; does anything "
                "else use it? Lower --max-step-tokens, or ask for fewer slots or a smaller KV pool"
            ) from error
        _log.info(log.event(f"{phase}.done", what=detail, seconds=time.monotonic() - started_s))


def start(
    config: Config, source: ModelSource, progress: Progress, host_budget_bytes: int | None = None
) -> Started:
    """Everything before serving. Raises ConfigError or EngineError with the reason.

    `host_budget_bytes`: of the host's memory; None: it is measured here, as that of a GPU is.
    """
    sizes = source.read_sizes()
    experts = choose_experts(config, sizes)
    plan = make_plan(config, source, sizes, experts, host_budget_bytes)
    log_plan(config, plan, experts, str(source.device))
    parts = _Start(config, source, progress, sizes, experts, plan)
    with parts.stage(Phase.CHECKING, "checking the model's class against transformers"):
        source.check(experts)
    return _start_on_gpu(parts) if sizes.on_gpu else _start_on_cpu(parts)


def _start_on_cpu(parts: _Start) -> Started:
    model = _load(parts)
    threads = StepThreads(torch.get_num_threads())
    runner = _make_runner(parts, model, threads)
    return Started(runner, announce(parts.config, parts.plan, runner, model))


def _start_on_gpu(parts: _Start) -> Started:
    memory = DeviceMemory(parts.source.device)
    model = _load(parts)
    with parts.stage(Phase.CHECKING, "measuring the link"):
        link = measure_link(model.device, model.bank_rows)  # while the KV pool's room is free
        assert link is not None
    memory.restart_peak()
    runner = _make_runner(parts, model, None)
    with parts.stage(Phase.CHECKING, "making room for more experts"):
        plan = grow_slots(parts.config, parts.sizes, parts.plan, model, memory)
    if parts.compiles and can_capture(model):
        _capture(parts, runner)
    with parts.stage(Phase.CHECKING, "warming up passes"):
        warm_up_passes(runner)  # after the capture, which empties the allocator's cache
    threshold = make_threshold(parts.config, parts.sizes, plan, link)
    runner.observer = StepObserver(threshold, model.num_layers)
    model.fill_slots()  # the steps so far asked for nothing that anyone will ask for
    check_prices(memory.peak(), plan.prices)
    return Started(runner, announce(parts.config, plan, runner, model))


def _capture(parts: _Start, runner: Runner) -> None:
    """CUDA graphs, unless the model asks the device something, which they cannot hold."""
    what = "capturing CUDA graphs"
    with parts.stage(Phase.CHECKING, what):
        try:
            runner.capture(lambda done, total: parts.report(what, done, total))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            _log.warning("steps run without CUDA graphs, several times slower: %s", describe(error))
            assert runner.graphs is not None
            runner.graphs.drop()


def _load(parts: _Start) -> Model:
    plan = parts.plan
    with parts.stage(Phase.LOADING, "loading weights"):
        slots = plan.num_slots if parts.experts == "slots" else None
        model = parts.source.load(parts.experts, slots, plan.context_tokens, parts.report)
        trim_heap()
    return model


def _make_runner(parts: _Start, model: Model, threads: StepThreads | None) -> Runner:
    """A runner that has run its first steps."""
    plan = parts.plan
    with parts.stage(
        Phase.CHECKING, "compiling and warming up" if parts.compiles else "warming up"
    ):
        pools = parts.source.make_pools(plan.num_pages, plan.page_size)
        assert pool_bytes(pools) == plan.prices["kv"]
        limits = make_limits(parts.config, parts.sizes, plan, parts.experts)
        runner = Runner(model, pools, limits, threads)
        if parts.compiles:
            model.compile()
        warm_up(runner, threads)
    return runner


def announce(config: Config, plan: MemoryPlan, runner: Runner, model: Model) -> WorkerReady:
    """All but the epoch."""
    limits = runner.limits
    return WorkerReady(
        epoch=0,
        model=Path(config.model or "").name,
        num_pages=plan.num_pages,
        page_size=plan.page_size,
        max_rows=limits.max_rows,
        window=plan.window,
        context_tokens=plan.context_tokens,
        context_flag=context_flag(config, plan),
        vocab_size=limits.vocab_size,
        num_layers=model.num_layers,
        max_step_tokens=limits.max_step_tokens,
        max_pass_tokens=limits.max_pass_tokens,
        max_on_demand_tokens=runner.max_on_demand_tokens,
        plan=plan.prices,
    )


def choose_experts(config: Config, sizes: ModelSizes) -> ExpertsMode:
    """`auto`: slots on a GPU, if there are experts at all; in place on a CPU, where every expert is
    in reach. ConfigError for options about slots then."""
    if config.experts == "slots":
        return "slots"
    if sizes.on_gpu:
        return "slots" if config.experts == "auto" and sizes.num_all_experts else "in-place"
    given = ["--moe-cache-auto"] if config.moe_cache_auto else []
    if config.extend_threshold != "auto":
        given.append(f"--extend-threshold {config.extend_threshold}")
    if given:
        raise ConfigError(f"{given[0]} is about expert slots, which need --experts slots")
    return "in-place"


def make_plan(
    config: Config,
    source: ModelSource,
    sizes: ModelSizes,
    experts: ExpertsMode,
    host_budget_bytes: int | None,
) -> MemoryPlan:
    """The memory plan for the device; ConfigError if it cannot hold."""
    request = make_request(config, sizes, has_slots=experts == "slots")
    found_bytes = source.find_banks(experts)  # not free, but ours; another model's are dropped
    if host_budget_bytes is None:
        host_budget_bytes = measure_budget()
    host_budget_bytes += found_bytes
    if not sizes.on_gpu:
        return plan_memory(sizes, request, host_budget_bytes)
    return plan_memory(sizes, request, measure_gpu_budget(source.device), host_budget_bytes)


def grow_slots(
    config: Config, sizes: ModelSizes, plan: MemoryPlan, model: Model, memory: DeviceMemory
) -> MemoryPlan:
    """Slots last, from what is left when steps have shown what they need: never fewer than planned,
    and exactly those where a flag says how many."""
    if not plan.num_slots or config.moe_cache_size or config.moe_cache_rate:
        return plan
    later_bytes = sum(plan.prices.get(name, 0) for name in LATER)
    spare = find_spare(memory.read(), plan.budget_bytes, later_bytes)
    num_slots = min(sizes.num_all_experts, plan.num_slots + spare // sizes.expert_bytes)
    if num_slots <= plan.num_slots:
        return plan
    if not _resize(model, num_slots, plan.num_slots):
        return plan
    rate = num_slots / sizes.num_all_experts
    _log.info(
        log.event("slots.grown", planned=plan.num_slots, moe_cache_size=num_slots)
        + f", resident experts {rate * 100:.0f} %"
    )
    prices = plan.prices | {"slots": num_slots * sizes.expert_bytes}
    return replace(plan, num_slots=num_slots, resident_rate=rate, prices=prices)


def _resize(model: Model, num_slots: int, num_planned: int) -> bool:
    """False: there are holes in what is free, and it stays at the number that has been there."""
    try:
        model.resize_slots(num_slots)
        return True
    except torch.OutOfMemoryError as error:
        reason = str(error)
    _log.warning(log.event("slots.not_grown", moe_cache_size=num_planned, error=reason))
    model.resize_slots(num_planned)
    return False


def make_threshold(config: Config, sizes: ModelSizes, plan: MemoryPlan, link: Link) -> Threshold:
    """From how many tokens on a step on the GPU is a pass."""
    routed = Routed(sizes.num_moe_layers, sizes.num_experts, sizes.top_k, sizes.expert_bytes)
    option, most = config.extend_threshold, plan.max_on_demand_tokens
    if option != "auto" and option > most:
        _log.warning(
            "--extend-threshold %d: steps on demand have at most %d new tokens here", option, most
        )
    threshold = Threshold(option, routed, link, plan.resident_rate, most)
    _log.info(log.event("threshold", **threshold.describe()))
    return threshold


def can_capture(model: Model) -> bool:
    if not model.can_capture:
        _log.warning("steps run without CUDA graphs, which need all expert banks to be pinned")
    return model.can_capture


def make_limits(
    config: Config, sizes: ModelSizes, plan: MemoryPlan, experts: ExpertsMode
) -> Limits:
    """`max_on_demand_tokens` says where there are passes; on a GPU a measured value replaces it."""
    threshold = None
    if experts == "slots" or sizes.on_gpu:
        threshold = on_demand_tokens(config.extend_threshold, sizes.num_experts, sizes.top_k)
    return Limits(
        max_rows=config.max_rows,
        num_pages=plan.num_pages,
        page_size=plan.page_size,
        context_tokens=plan.context_tokens,
        vocab_size=sizes.vocab_size,
        max_step_tokens=plan.max_on_demand_tokens,
        chunk_tokens=plan.max_step_tokens,
        max_pass_tokens=plan.max_pass_tokens,
        max_on_demand_tokens=threshold,
    )
