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
from freetoken.errors import ConfigError
from freetoken.experts.cost import Link, Routed
from freetoken.model.heap import trim_heap
from freetoken.wire.messages import Phase, WorkerReady
from freetoken.worker.budget import measure_gpu_budget
from freetoken.worker.device import DeviceMemory, check_prices, find_spare
from freetoken.worker.kv import pool_bytes
from freetoken.worker.link import Progress
from freetoken.worker.link_speed import measure_link
from freetoken.worker.memory import MemoryPlan, plan_memory
from freetoken.worker.model import Model
from freetoken.worker.observe import StepObserver
from freetoken.worker.runner import Limits, Runner
from freetoken.worker.sizes import ModelSizes, make_request
from freetoken.worker.source import ExpertsMode, ModelSource
from freetoken.worker.threads import StepThreads
from freetoken.worker.threshold import Threshold, on_demand_tokens
from freetoken.worker.warmup import warm_up

_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class Started:
    """A runner, and what to announce of it: all but the epoch."""

    runner: Runner
    ready: WorkerReady


def start(
    config: Config, source: ModelSource, progress: Progress, host_budget_bytes: int
) -> Started:
    """Everything before serving. Raises ConfigError or EngineError with the reason.

    `host_budget_bytes`: of the host's memory; that of a GPU is measured here.
    """
    sizes = source.read_sizes()
    experts = choose_experts(config, sizes)
    plan = make_plan(config, source, sizes, experts, host_budget_bytes)
    log_plan(config, sizes, plan, experts)

    def report(detail: str, done: int, total: int) -> None:
        progress.detail, progress.done, progress.total = detail, done, total

    with _stage(progress, Phase.CHECKING, "checking the model's class against transformers"):
        source.check(experts)
    with _stage(progress, Phase.LOADING, "loading weights"):
        slots = plan.num_slots if experts == "slots" else None
        model = source.load(experts, slots, plan.context_tokens, report)
        trim_heap()
        # Now there is room for it: the KV pool is still to come.
        link = measure_link(model.device, model.bank_rows) if sizes.on_gpu else None
    memory = DeviceMemory(source.device) if sizes.on_gpu else None
    with _stage(progress, Phase.CHECKING, "warming up"):
        pools = source.make_pools(plan.num_pages, plan.page_size)
        assert pool_bytes(pools) == plan.prices["kv"]
        limits = make_limits(config, sizes, plan, experts)
        threads = None if sizes.on_gpu else StepThreads(torch.get_num_threads())
        runner = Runner(model, pools, limits, threads)
        if sizes.on_gpu and config.compile == "auto":
            progress.detail = "compiling and warming up"
            model.compile()
        warm_up(runner, threads)
    if memory is not None and link is not None:
        plan = grow_slots(config, sizes, plan, model, memory)
        threshold = make_threshold(config, sizes, plan, link)
        runner.observer = StepObserver(threshold, model.num_layers)
        if config.compile == "auto" and can_capture(model):
            with _stage(progress, Phase.CHECKING, "capturing CUDA graphs"):
                runner.capture(lambda done, total: report("capturing CUDA graphs", done, total))
        check_prices(memory.peak(), plan.prices)
    return Started(runner, announce(config, plan, runner, model))


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
        vocab_size=limits.vocab_size,
        num_layers=model.num_layers,
        max_step_tokens=limits.max_step_tokens,
        max_pass_tokens=limits.max_pass_tokens,
        max_on_demand_tokens=runner.max_on_demand_tokens,
        plan=plan.prices,
    )


def choose_experts(config: Config, sizes: ModelSizes) -> ExpertsMode:
    """`auto`: slots on a GPU, if there are experts at all; in place on a CPU, where every expert is
    in reach. ConfigError for a threshold then."""
    if config.experts == "slots":
        return "slots"
    if sizes.on_gpu:
        return "slots" if config.experts == "auto" and sizes.num_all_experts else "in-place"
    if config.extend_threshold != "auto":
        raise ConfigError(
            f"--extend-threshold {config.extend_threshold} is about expert slots, which need "
            "--experts slots"
        )
    return "in-place"


def make_plan(
    config: Config,
    source: ModelSource,
    sizes: ModelSizes,
    experts: ExpertsMode,
    host_budget_bytes: int,
) -> MemoryPlan:
    """The memory plan for the device; ConfigError if it cannot hold."""
    request = make_request(config, sizes, has_slots=experts == "slots")
    host_budget_bytes += source.find_banks(experts)  # they are not free, but ours
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
    spare = find_spare(memory.read(), plan.budget_bytes, plan.prices.get("graphs", 0))
    num_slots = min(sizes.num_all_experts, plan.num_slots + spare // sizes.expert_bytes)
    if num_slots <= plan.num_slots:
        return plan
    model.resize_slots(num_slots)
    rate = num_slots / sizes.num_all_experts
    _log.info(
        log.event("slots.grown", planned=plan.num_slots, moe_cache_size=num_slots)
        + f", resident experts {rate * 100:.0f} %"
    )
    prices = plan.prices | {"slots": num_slots * sizes.expert_bytes}
    return replace(plan, num_slots=num_slots, resident_rate=rate, prices=prices)


def make_threshold(config: Config, sizes: ModelSizes, plan: MemoryPlan, link: Link) -> Threshold:
    """From how many tokens on a step on the GPU is a pass."""
    routed = Routed(sizes.num_moe_layers, sizes.num_experts, sizes.top_k, sizes.expert_bytes)
    most = plan.max_on_demand_tokens
    threshold = Threshold(config.extend_threshold, routed, link, plan.resident_rate, most)
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


@contextmanager
def _stage(progress: Progress, phase: Phase, detail: str) -> Iterator[None]:
    progress.phase, progress.detail, progress.done, progress.total = phase, detail, 0, 0
    started_s = time.monotonic()
    yield
    _log.info(log.event(f"{phase}.done", what=detail, seconds=time.monotonic() - started_s))
