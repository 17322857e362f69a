"""The lines of the start that say what was asked for, what it became, and what that means."""

from __future__ import annotations

from freetoken import log
from freetoken.config import Config
from freetoken.worker.memory import MemoryPlan
from freetoken.worker.source import ExpertsMode

_log = log.get(__name__)


def log_plan(config: Config, plan: MemoryPlan, experts: ExpertsMode, device: str) -> None:
    """The three lines of the start: requested, resolved, effective. `device`: as resolved."""
    flags = (
        "context_tokens num_tokens num_pages kv_reserve_tokens max_seq_len_override "
        "moe_cache_size moe_cache_rate extend_threshold page_size max_rows max_step_tokens compile"
    )
    asked = {name: getattr(config, name) for name in flags.split()}
    given = {name: value for name, value in asked.items() if value is not None}
    _log.info(log.event("requested", device=config.device, experts=config.experts, **given))
    sizes = plan.prices | {f"host_{name}": size for name, size in plan.host_prices.items()}
    _log.info(
        log.event(
            "resolved",
            moe_cache_size=plan.num_slots,
            num_pages=plan.num_pages,
            page_size=plan.page_size,
            device=device,
            experts=experts,
            max_step_tokens=plan.max_step_tokens,
            planned_mib=plan.planned_bytes >> 20,
            budget_mib=plan.budget_bytes >> 20,
            **{f"{name}_mib": size >> 20 for name, size in sizes.items()},
        )
    )
    line = (
        f"effective KV context: {plan.context_tokens} tokens (reserve {plan.reserve_tokens}, "
        f"window {plan.window}, resident experts {plan.resident_rate * 100:.0f} %)"
    )
    if plan.context_tokens < plan.window:
        flag = context_flag(config, plan)
        _log.warning("%s; %s uses the whole window", line, _whole_window(flag, plan))
    else:
        _log.info(line)


def context_flag(config: Config, plan: MemoryPlan) -> str:
    """The option that sets, and so may raise, what one request may use; empty if the model's own
    window is the limit."""
    if plan.context_tokens == plan.window:
        return "" if config.max_seq_len_override is None else "--max-seq-len-override"
    if config.num_tokens is not None:
        return "--num-tokens"
    return "--context-tokens" if config.num_pages is None else "--num-pages"


def _whole_window(flag: str, plan: MemoryPlan) -> str:
    """`flag` with the value that lets one request use the whole window."""
    pages = -(-plan.window // plan.page_size)
    values = {"--num-tokens": pages * plan.page_size, "--num-pages": pages}
    return f"{flag} {values.get(flag, plan.window)}"
