"""The memory plan: what fits into a budget, as a pure function of numbers.

Every byte the worker will hold has a name and a price; the prices add up to at most the budget, or
the plan is refused with the arithmetic. Flags are hard constraints, never quietly reduced. Knows
neither torch nor the machine: budget.py measures the budgets, kv.py and the model allocate.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from freetoken.errors import ConfigError
from freetoken.worker.capacity import (
    MIN_CONTEXT_TOKENS,
    check_flags,
    exact_pages,
    explicit_slots,
    to_pages,
)
from freetoken.worker.gpu_activations import MAX_ON_DEMAND_TOKENS
from freetoken.worker.prices import Pages, pass_tokens, price_fixed, price_host
from freetoken.worker.sizes import ModelSizes, Request

MIB = 1 << 20
DEFAULT_CONTEXT_TOKENS = 32768
"""The automatic pool holds one request of min(W, this), if it can at all."""
MIN_SLOTS_PER_LAYER_AND_CHOICE = 2
"""The automatic pool leaves at least this many slots times top_k for each layer with experts."""
CPU_STEP_TOKENS = 512
GPU_STEP_TOKENS = (8192, 4096, 2048, 1024, 512, 256)
"""Chunks of a pass to choose from: every chunk reads a layer's experts from VRAM once more."""
MAX_CHUNK_SHARE = 16
"""A chunk takes at most one part in so many of what weights, ring and scratch rows leave, or what
the smallest one takes: norms over all tokens of a pass need as much beside any chunk."""


class Memory(StrEnum):
    """Which memory a plan is short of; on the CPU there is only the host's."""

    HOST = "host memory"
    GPU = "GPU memory"


class ShortfallError(ConfigError):
    """The budget of `memory` is too small by `short_bytes`."""

    def __init__(self, message: str, short_bytes: int, memory: Memory) -> None:
        super().__init__(message)
        self.short_bytes = short_bytes
        self.memory = memory


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`prices`: bytes by name, everything there is; `host_prices`: on a GPU, what lies in host
    memory instead; `page_bytes`: one page over all layers."""

    budget_bytes: int
    prices: dict[str, int]
    page_bytes: int
    num_pages: int
    page_size: int
    window: int
    context_tokens: int
    reserve_tokens: int
    num_slots: int
    resident_rate: float  # share of the experts that have a slot; 1 in place
    max_step_tokens: int  # computed at a time; on a GPU the chunk of a pass
    max_pass_tokens: int
    max_on_demand_tokens: int  # the largest step on demand, whatever the threshold
    host_prices: dict[str, int] = field(default_factory=dict)

    @property
    def planned_bytes(self) -> int:
        return sum(self.prices.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host_prices.values())


def plan_memory(
    sizes: ModelSizes,
    request: Request,
    budget_bytes: int,
    host_budget_bytes: int | None = None,
) -> MemoryPlan:
    """The plan for `budget_bytes` of the memory that computes, on a GPU its own.

    `host_budget_bytes`: for a model on a GPU, what the banks and the process may take (banks that
    are there already included); None: not checked. ConfigError for flags that contradict each
    other, ShortfallError for flags that do not fit, each with the numbers.
    """
    window = request.max_seq_len_override or sizes.window
    required_tokens = check_flags(sizes, request, window)
    if sizes.on_gpu and host_budget_bytes is not None:
        _check_host(sizes, request, host_budget_bytes)
    shortfalls = []
    for step_tokens in _step_choices(sizes, request, window, budget_bytes):
        try:
            return _plan(sizes, request, budget_bytes, window, required_tokens, step_tokens)
        except ShortfallError as shortfall:
            shortfalls.append(shortfall)
    raise min(shortfalls, key=lambda shortfall: shortfall.short_bytes)


def _plan(
    sizes: ModelSizes,
    request: Request,
    budget_bytes: int,
    window: int,
    required_tokens: int,
    step_tokens: int,
) -> MemoryPlan:
    fixed = price_fixed(sizes, request, step_tokens)
    pages = Pages(sizes, request, window, step_tokens)
    min_pages = exact_pages(request) or max(1, to_pages(required_tokens, request.page_size))
    _check_least(sizes, request, fixed, pages, min_pages, budget_bytes)
    num_pages, num_slots = _share_out(sizes, request, window, pages, fixed, budget_bytes, min_pages)
    prices = fixed | pages.named(num_pages)
    if request.has_slots:
        prices["slots"] = num_slots * sizes.expert_bytes
    usable = num_pages * request.page_size
    on_demand_tokens = min(step_tokens, MAX_ON_DEMAND_TOKENS) if sizes.on_gpu else step_tokens
    plan = MemoryPlan(
        budget_bytes=budget_bytes,
        prices=prices,
        page_bytes=pages.page_bytes,
        num_pages=num_pages,
        page_size=request.page_size,
        window=window,
        context_tokens=min(window, usable),
        reserve_tokens=max(required_tokens, min(window, DEFAULT_CONTEXT_TOKENS, usable)),
        num_slots=num_slots,
        resident_rate=num_slots / sizes.num_all_experts if request.has_slots else 1.0,
        max_step_tokens=step_tokens,
        max_pass_tokens=pass_tokens(sizes, request, step_tokens) or step_tokens,
        max_on_demand_tokens=on_demand_tokens,
        host_prices=price_host(sizes, request) if sizes.on_gpu else {},
    )
    assert plan.planned_bytes <= budget_bytes
    assert plan.context_tokens >= (request.context_tokens or MIN_CONTEXT_TOKENS)
    return plan


def _check_least(
    sizes: ModelSizes,
    request: Request,
    fixed: dict[str, int],
    pages: Pages,
    min_pages: int,
    budget_bytes: int,
) -> None:
    """ShortfallError if not even what the flags ask for fits."""
    needs = fixed | pages.named(min_pages)
    if request.has_slots:
        slots = explicit_slots(sizes, request)
        needs["slots"] = (1 if slots is None else slots) * sizes.expert_bytes
    if sum(needs.values()) > budget_bytes:
        raise _shortfall(sizes, needs, budget_bytes, min_pages * request.page_size, request)


def _step_choices(sizes: ModelSizes, request: Request, window: int, budget_bytes: int) -> list[int]:
    """Tokens computed at a time, best first: as asked for, else the largest chunk within its share
    of the budget and what is smaller; and at last, rather than nothing, what is larger."""
    if request.max_step_tokens is not None:
        return [request.max_step_tokens]
    if not sizes.on_gpu:
        return [CPU_STEP_TOKENS]
    within: list[int] = []
    beyond: list[int] = []
    least = price_fixed(sizes, request, GPU_STEP_TOKENS[-1])["activations"]
    for tokens in GPU_STEP_TOKENS:
        prices = price_fixed(sizes, request, tokens)
        lasting = sum(prices.get(name, 0) for name in ("weights", "ring", "scratch"))
        share = max(0, budget_bytes - lasting) // MAX_CHUNK_SHARE
        if tokens == GPU_STEP_TOKENS[-1] or tokens < 2 * window:
            (within if prices["activations"] <= max(least, share) else beyond).append(tokens)
    return within + beyond[::-1]


def _share_out(
    sizes: ModelSizes,
    request: Request,
    window: int,
    pages: Pages,
    fixed: dict[str, int],
    budget_bytes: int,
    min_pages: int,
) -> tuple[int, int]:
    """(pages, slots) for what the fixed parts leave."""
    left = budget_bytes - sum(fixed.values())
    exact, slots = exact_pages(request), explicit_slots(sizes, request)
    num_pages = exact
    if num_pages is None:
        third = (left + (fixed.get("scratch", 0) if sizes.on_gpu else 0)) // 3
        num_pages = _automatic_pages(sizes, request, window, pages, left, third, min_pages, slots)
    if slots is None:
        free = left - pages.price(num_pages)
        slots = min(sizes.num_all_experts, free // sizes.expert_bytes)
    if exact is None and sizes.on_gpu:
        # Nothing else has a use for it.
        rest = pages.fitting(left - slots * sizes.expert_bytes)
        num_pages = max(num_pages, min(rest, _useful_pages(request, window)))
    return num_pages, slots


def _automatic_pages(
    sizes: ModelSizes,
    request: Request,
    window: int,
    pages: Pages,
    left: int,
    third: int,
    min_pages: int,
    slots: int | None,
) -> int:
    """A third of what is left, raised to one usual context as long as enough slots remain."""
    if slots is None:
        some_slots = MIN_SLOTS_PER_LAYER_AND_CHOICE * sizes.top_k * sizes.num_moe_layers
        kept_bytes = min(some_slots, sizes.num_all_experts) * sizes.expert_bytes
        least_bytes = sizes.expert_bytes
    else:
        kept_bytes = least_bytes = 0
        left -= slots * sizes.expert_bytes
        third = min(third, left // 3)
    wanted = pages.fitting(third)
    if request.automatic_pool_tokens is not None or sizes.on_gpu:
        wanted = min(wanted, _useful_pages(request, window))
    usual_tokens = min(window, DEFAULT_CONTEXT_TOKENS)
    usual = min(to_pages(usual_tokens, request.page_size), pages.fitting(left - kept_bytes))
    return max(min_pages, min(max(wanted, usual), pages.fitting(left - least_bytes)))


def _useful_pages(request: Request, window: int) -> int:
    """The automatic pool is no larger: by default, every row has a whole window."""
    tokens = request.automatic_pool_tokens or request.max_rows * window
    return to_pages(max(tokens, min(window, DEFAULT_CONTEXT_TOKENS)), request.page_size)


def _check_host(sizes: ModelSizes, request: Request, budget_bytes: int) -> None:
    needs = price_host(sizes, request)
    short = sum(needs.values()) - budget_bytes
    if short > 0:
        less = ", leave --worker-restarts out" if request.has_standby else ""
        raise ShortfallError(
            f"the model's experts need {_sum(needs)} of host memory, the budget is "
            f"{_mib(max(0, budget_bytes))}: {_mib(short)} short; free memory, raise the "
            f"container's limit{less}, or use a smaller model or --dtype",
            short,
            Memory.HOST,
        )


def _shortfall(
    sizes: ModelSizes,
    needs: dict[str, int],
    budget_bytes: int,
    pool_tokens: int,
    request: Request,
) -> ShortfallError:
    short = sum(needs.values()) - budget_bytes
    remedies = ["use a larger GPU" if sizes.on_gpu else "free memory or raise the limit"]
    if request.context_tokens or request.num_pages or request.num_tokens:
        remedies.append("ask for a smaller KV pool")
    if request.moe_cache_size or request.moe_cache_rate:
        remedies.append("ask for fewer expert slots")
    remedies.append("lower --max-step-tokens or --max-rows")
    memory = Memory.GPU if sizes.on_gpu else Memory.HOST
    return ShortfallError(
        f"the model with a KV pool of {pool_tokens} tokens needs {_sum(needs)} of "
        f"{memory if sizes.on_gpu else 'memory'}, the budget is {_mib(max(0, budget_bytes))}: "
        f"{_mib(short)} short; {', '.join(remedies)}",
        short,
        memory,
    )


def _sum(needs: dict[str, int]) -> str:
    parts = " + ".join(f"{name} {_mib(size)}" for name, size in needs.items())
    return f"{parts} = {_mib(sum(needs.values()))}"


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes // MIB)} MiB"
