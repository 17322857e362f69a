"""The memory plan: what fits into a budget, as a pure function of numbers.

Every byte the worker will hold has a name and a price; the prices add up to at most the budget, or
the plan is refused with the arithmetic. Flags are hard constraints, never quietly reduced. Knows
neither torch nor the machine: budget.py measures the budget, kv.py and the model allocate.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.errors import ConfigError
from freetoken.worker.activations import StepSizes, price_activations, price_reach
from freetoken.worker.sizes import ModelSizes, Request

MIB = 1 << 20
DEFAULT_CONTEXT_TOKENS = 32768
"""The automatic pool holds one request of min(W, this), if it can at all."""
MIN_CONTEXT_TOKENS = 2
"""The smallest request: one token of prompt, one of output."""
MAX_PASS_TOKENS = 32768
"""Tokens in one pass: tens of thousands, so that each expert crosses the link once for them."""
MIN_SLOTS_PER_LAYER_AND_CHOICE = 2
"""The automatic pool leaves at least this many slots times top_k for each layer with experts."""


class ShortfallError(ConfigError):
    """The budget is too small by `short_bytes`."""

    def __init__(self, message: str, short_bytes: int) -> None:
        super().__init__(message)
        self.short_bytes = short_bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`prices`: bytes by name, everything there is; `page_bytes`: one page over all layers."""

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
    max_pass_tokens: int

    @property
    def planned_bytes(self) -> int:
        return sum(self.prices.values())


def plan_memory(sizes: ModelSizes, request: Request, budget_bytes: int) -> MemoryPlan:
    """The plan for `budget_bytes`; ConfigError for flags that contradict each other,
    ShortfallError for flags that do not fit, each with the numbers."""
    window = request.max_seq_len_override or sizes.window
    required_tokens = _check_flags(sizes, request, window)
    fixed = _price_fixed(sizes, request)
    slots = _explicit_slots(sizes, request)
    slot_bytes = sizes.expert_bytes if request.has_slots else 0
    pages = _Pages(sizes, request, window)
    left = budget_bytes - sum(fixed.values())
    exact = _exact_pages(request)
    min_pages = exact or max(1, _to_pages(required_tokens, request.page_size))
    min_slots = slots if slots is not None else int(request.has_slots)
    short = pages.price(min_pages) + min_slots * slot_bytes - left
    if short > 0:
        needs = fixed | pages.named(min_pages)
        if request.has_slots:
            needs["slots"] = min_slots * slot_bytes
        raise _shortfall(needs, budget_bytes, short, min_pages * request.page_size, request)
    num_pages = exact or _automatic_pages(sizes, request, window, pages, left, min_pages, slots)
    if slots is None:
        free = left - pages.price(num_pages)
        slots = min(sizes.num_all_experts, free // slot_bytes) if slot_bytes else 0
    prices = fixed | pages.named(num_pages)
    if request.has_slots:
        prices["slots"] = slots * slot_bytes
    usable = num_pages * request.page_size
    plan = MemoryPlan(
        budget_bytes=budget_bytes,
        prices=prices,
        page_bytes=pages.page_bytes,
        num_pages=num_pages,
        page_size=request.page_size,
        window=window,
        context_tokens=min(window, usable),
        reserve_tokens=max(required_tokens, min(window, DEFAULT_CONTEXT_TOKENS, usable)),
        num_slots=slots,
        resident_rate=slots / sizes.num_all_experts if request.has_slots else 1.0,
        max_pass_tokens=_pass_tokens(request) if request.has_slots else request.max_step_tokens,
    )
    assert plan.planned_bytes <= budget_bytes
    assert plan.context_tokens >= (request.context_tokens or MIN_CONTEXT_TOKENS)
    return plan


class _Pages:
    """The price of pages: their k/v, and what attention needs for a row that reaches this far: its
    k/v gathered in one layer at a time, and the bias of an extend."""

    def __init__(self, sizes: ModelSizes, request: Request, window: int) -> None:
        self.page_bytes = sizes.kv_token_bytes() * request.page_size
        self._reach_bytes = price_reach(sizes, request.max_step_tokens) * request.page_size
        self._window_pages = _to_pages(window, request.page_size)

    def price(self, num_pages: int) -> int:
        return sum(self.named(num_pages).values())

    def fitting(self, num_bytes: int) -> int:
        """The most pages whose price is at most `num_bytes`."""
        num_bytes = max(0, num_bytes - self.page_bytes)
        within = num_bytes // (self.page_bytes + self._reach_bytes)
        if within <= self._window_pages:
            return within
        return (num_bytes - self._window_pages * self._reach_bytes) // self.page_bytes

    def named(self, num_pages: int) -> dict[str, int]:
        """The sentinel page included."""
        return {
            "kv": (num_pages + 1) * self.page_bytes,
            "kv_reach": min(num_pages, self._window_pages) * self._reach_bytes,
        }


def _check_flags(sizes: ModelSizes, request: Request, window: int) -> int:
    """The tokens that the pool must hold because a flag says so; ConfigError if flags disagree."""
    if request.num_tokens is not None and request.num_pages is not None:
        raise ConfigError(
            f"--num-tokens {request.num_tokens} and --num-pages {request.num_pages} both size the "
            f"KV pool; give one of them"
        )
    if request.num_tokens is not None and request.num_tokens % request.page_size:
        below = request.num_tokens // request.page_size * request.page_size
        nearest = f"{below} or " if below else ""
        raise ConfigError(
            f"--num-tokens {request.num_tokens} is no multiple of --page-size "
            f"{request.page_size}; the nearest are {nearest}{below + request.page_size}"
        )
    if request.context_tokens is not None and request.context_tokens > window:
        raise ConfigError(
            f"--context-tokens {request.context_tokens} is beyond the window of {window} tokens; "
            f"lower it or raise the window with --max-seq-len-override"
        )
    required = max(request.context_tokens or 0, request.kv_reserve_tokens or 0)
    exact = _exact_pages(request)
    pool = "--num-tokens" if request.num_tokens is not None else "--num-pages"
    if exact is not None and exact * request.page_size < MIN_CONTEXT_TOKENS:
        raise ConfigError(
            f"{pool} {request.num_tokens or request.num_pages} makes a KV pool of 1 token, the "
            f"smallest request has {MIN_CONTEXT_TOKENS} (one of prompt, one of output); raise it"
        )
    if exact is not None and exact * request.page_size < required:
        is_context = required == request.context_tokens
        raise ConfigError(
            f"{'--context-tokens' if is_context else '--kv-reserve-tokens'} {required} does not "
            f"fit the pool of {exact * request.page_size} tokens that {pool} asks for"
        )
    _check_slot_flags(sizes, request)
    return max(required, MIN_CONTEXT_TOKENS)


def _check_slot_flags(sizes: ModelSizes, request: Request) -> None:
    flags = {
        "--moe-cache-size": request.moe_cache_size,
        "--moe-cache-rate": request.moe_cache_rate,
    }
    given = [f"{flag} {value}" for flag, value in flags.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} both set the expert slots; give one of them")
    if given and not request.has_slots:
        raise ConfigError(f"{given[0]} sizes the slot cache, which needs --experts slots")
    if request.has_slots and not sizes.num_all_experts:
        raise ConfigError("--experts slots: the model has no routed experts; leave the flag out")


def _exact_pages(request: Request) -> int | None:
    if request.num_tokens is not None:
        return request.num_tokens // request.page_size
    return request.num_pages


def _explicit_slots(sizes: ModelSizes, request: Request) -> int | None:
    """Slots as asked for, at most one per expert; 0 in place; None: automatic."""
    if not request.has_slots:
        return 0
    if request.moe_cache_rate is not None:
        return max(1, round(request.moe_cache_rate * sizes.num_all_experts))
    if request.moe_cache_size is not None:
        return min(request.moe_cache_size, sizes.num_all_experts)
    return None


def _pass_tokens(request: Request) -> int:
    return max(request.max_step_tokens, MAX_PASS_TOKENS)


def _price_fixed(sizes: ModelSizes, request: Request) -> dict[str, int]:
    step = StepSizes(
        num_tokens=request.max_step_tokens + request.max_rows,
        num_rows=request.max_rows,
        num_pass_tokens=_pass_tokens(request) if request.has_slots else 0,
    )
    prices = {
        "weights": sizes.dense_bytes,
        "experts": sizes.num_all_experts * sizes.expert_bytes,
        "libraries": sizes.library_bytes,
    }
    if request.has_slots:
        # A step or pass that needs more than the slots hold gets one layer's experts at a time.
        prices["scratch"] = sizes.num_experts * sizes.expert_bytes
    return prices | price_activations(sizes, step)


def _automatic_pages(
    sizes: ModelSizes,
    request: Request,
    window: int,
    pages: _Pages,
    left: int,
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
    wanted = pages.fitting(left // 3)
    usual_tokens = min(window, DEFAULT_CONTEXT_TOKENS)
    if request.automatic_pool_tokens is not None:
        tokens = max(request.automatic_pool_tokens, usual_tokens)
        wanted = min(wanted, _to_pages(tokens, request.page_size))
    usual = min(_to_pages(usual_tokens, request.page_size), pages.fitting(left - kept_bytes))
    return max(min_pages, min(max(wanted, usual), pages.fitting(left - least_bytes)))


def _to_pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def _shortfall(
    needs: dict[str, int], budget_bytes: int, short: int, pool_tokens: int, request: Request
) -> ShortfallError:
    sums = " + ".join(f"{name} {_mib(size)}" for name, size in needs.items())
    remedies = ["free memory or raise the limit"]
    if request.context_tokens or request.num_pages or request.num_tokens:
        remedies.append("ask for a smaller KV pool")
    if request.moe_cache_size or request.moe_cache_rate:
        remedies.append("ask for fewer expert slots")
    remedies.append("lower --max-step-tokens or --max-rows")
    return ShortfallError(
        f"the model with a KV pool of {pool_tokens} tokens needs {sums} = "
        f"{_mib(sum(needs.values()))} of memory, the budget is {_mib(max(0, budget_bytes))}: "
        f"{_mib(short)} short; {', '.join(remedies)}",
        short,
    )


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes // MIB)} MiB"
