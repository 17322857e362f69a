"""What the capacity flags say by themselves: contradictions, exact pools, exact slots.

Called by memory.py. Pure; knows no budget.
"""

from __future__ import annotations

from freetoken.errors import ConfigError
from freetoken.worker.sizes import ModelSizes, Request

MIN_CONTEXT_TOKENS = 2
"""The smallest request: one token of prompt, one of output."""


def check_flags(sizes: ModelSizes, request: Request, window: int) -> int:
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
    exact = exact_pages(request)
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
    if sizes.on_gpu and sizes.num_all_experts and not request.has_slots:
        raise ConfigError("--experts in-place is for models on the CPU; leave it out on a GPU")
    if given and not request.has_slots:
        raise ConfigError(f"{given[0]} sizes the slot cache, which needs --experts slots")
    if request.has_slots and not sizes.num_all_experts:
        raise ConfigError("--experts slots: the model has no routed experts; leave the flag out")


def exact_pages(request: Request) -> int | None:
    """Pages of the pool as asked for; None: automatic."""
    if request.num_tokens is not None:
        return request.num_tokens // request.page_size
    return request.num_pages


def explicit_slots(sizes: ModelSizes, request: Request) -> int | None:
    """Slots as asked for, at most one per expert; 0 in place; None: automatic."""
    if not request.has_slots:
        return 0
    if request.moe_cache_rate is not None:
        return max(1, round(request.moe_cache_rate * sizes.num_all_experts))
    if request.moe_cache_size is not None:
        return min(request.moe_cache_size, sizes.num_all_experts)
    return None


def to_pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)
