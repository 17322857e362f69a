"""What `ft plan` prints: the plan's parts, and the table of context against resident experts.

Pure text from numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from freetoken.commands.plan import Hardware
from freetoken.commands.quantity import show_gib
from freetoken.config import Config
from freetoken.experts.cost import (
    LRU_STACK,
    Machine,
    Routed,
    Work,
    decode_tokens_s,
    hit_rate_lru_stack,
    prompt_s,
)
from freetoken.worker.memory import MemoryPlan, ShortfallError, plan_memory
from freetoken.worker.sizes import ModelSizes, Request, make_request
from freetoken.worker.threshold import Threshold

MIB = 1 << 20
SMALLEST_CONTEXT = 4096

PARTS = {
    "weights": "all but the routed experts",
    "libraries": "workspaces, loaded kernels",
    "scratch": "one layer's experts, for steps wider than the slots",
    "ring": "two layers' experts, for passes",
    "tables": "which expert sits where",
    "activations": "temporaries of one chunk of a pass",
    "graphs": "steps on demand",
    "sampling": "logits and what becomes of them",
    "pass": "hidden states of all tokens of a pass",
    "kv": "keys and values",
    "kv_reach": "keys and values of one row gathered in a pass, page table",
    "slots": "the experts that stay",
    "banks": "all experts",
    "process": "the worker itself",
    "standby": "the worker that stands by",
}


def describe(name: str, sizes: ModelSizes, config: Config, hardware: Hardware) -> str:
    """The whole text; ShortfallError if the flags do not fit the hardware."""
    request = make_request(config, sizes, has_slots=sizes.num_all_experts > 0)
    plan = plan_memory(sizes, request, hardware.budget_bytes, hardware.host_budget_bytes)
    lines = [
        f"{name}: {_experts_line(sizes)}",
        f"GPU of {show_gib(hardware.vram_bytes)}, {show_gib(hardware.host_bytes)} of host memory, "
        f"link {hardware.machine.link.copy_bytes_s / 1e9:.1f} GB/s",
        "",
        *_parts("GPU memory, MiB", plan.prices, hardware.budget_bytes),
        "",
        *_parts("host memory, MiB", plan.host_prices, hardware.host_budget_bytes),
        "",
        *_results(sizes, config, plan, hardware.machine),
        "",
        *_table(sizes, request, plan, hardware),
        "",
        *_assumptions(plan, hardware.machine),
    ]
    return "\n".join([*lines, ""])


def _experts_line(sizes: ModelSizes) -> str:
    if not sizes.num_all_experts:
        return f"{len(sizes.kv_widths)} layers, no routed experts"
    return (
        f"{sizes.num_moe_layers} layers of {sizes.num_experts} experts, {sizes.top_k} a token, "
        f"{sizes.expert_bytes / MIB:.2f} MiB each"
    )


def _parts(title: str, prices: dict[str, int], budget_bytes: int) -> Iterator[str]:
    yield title
    for name, size in prices.items():
        yield f"  {name:12}{_mib(size):>11}   {PARTS.get(name, '')}".rstrip()
    yield f"  {'sum':12}{_mib(sum(prices.values())):>11}   of {_mib(budget_bytes)}"


def _results(
    sizes: ModelSizes, config: Config, plan: MemoryPlan, machine: Machine
) -> Iterator[str]:
    yield (
        f"context      {plan.context_tokens} tokens per request, window {plan.window} "
        f"({plan.num_pages} pages of {plan.page_size})"
    )
    if sizes.num_all_experts:
        yield (
            f"slots        {plan.num_slots} of {sizes.num_all_experts} experts resident "
            f"({plan.resident_rate * 100:.1f} %)"
        )
    threshold = Threshold(
        config.extend_threshold,
        _routed(sizes),
        machine.link,
        plan.resident_rate,
        plan.max_on_demand_tokens,
        machine.vram_bytes_s,
    )
    yield (
        f"prompts      up to {threshold.tokens} new tokens on demand; longer ones in passes of "
        f"{plan.max_pass_tokens} tokens, {plan.max_step_tokens} at a time"
    )


# ---------------------------------------------------------------- the table


def _table(
    sizes: ModelSizes, request: Request, plan: MemoryPlan, hardware: Hardware
) -> Iterator[str]:
    """One line for each context that one request could have."""
    yield "              experts    tokens/s of one stream       first token of a"
    yield "    context  resident   uniform   with locality   prompt of that length"
    for tokens in _contexts(plan):
        if tokens == plan.context_tokens:
            yield f"* {_line(sizes, plan, tokens, hardware.machine)}"
            continue
        pages = -(-tokens // request.page_size)
        asked = replace(
            request, context_tokens=None, num_tokens=None, num_pages=pages, kv_reserve_tokens=None
        )
        try:
            other = plan_memory(sizes, asked, hardware.budget_bytes)
        except ShortfallError as shortfall:
            yield f"  {tokens:>9}   does not fit: {_mib(shortfall.short_bytes)} MiB short"
        else:
            yield f"  {_line(sizes, other, tokens, hardware.machine)}"


def _line(sizes: ModelSizes, plan: MemoryPlan, tokens: int, machine: Machine) -> str:
    work, rate = work_of(sizes), plan.resident_rate
    uniform = decode_tokens_s(work, machine, rate, tokens // 2)
    local = decode_tokens_s(work, machine, hit_rate_lru_stack(rate), tokens // 2)
    first_s = prompt_s(work, machine, rate, tokens, plan.max_pass_tokens)
    return f"{tokens:>9} {rate * 100:>7.1f} % {uniform:>9.1f} {local:>15.1f} {first_s:>21.1f} s"


def _contexts(plan: MemoryPlan) -> list[int]:
    """Powers of two up to the window, the window, and what the plan gives."""
    found = {plan.window, plan.context_tokens}
    tokens = SMALLEST_CONTEXT
    while tokens < plan.window:
        found.add(tokens)
        tokens *= 2
    return sorted(found)


def _routed(sizes: ModelSizes) -> Routed:
    return Routed(sizes.num_moe_layers, sizes.num_experts, sizes.top_k, sizes.expert_bytes)


def work_of(sizes: ModelSizes) -> Work:
    """What the predictions need of a model."""
    return Work(
        routed=_routed(sizes),
        dense_bytes=sizes.step_weight_bytes,
        head_bytes=sizes.head_bytes,
        kv_token_bytes=sizes.kv_token_bytes(),
        query_width=sizes.query_width,
        num_attention_layers=len(sizes.kv_widths),
        element_bytes=sizes.element_bytes,
    )


def _assumptions(plan: MemoryPlan, machine: Machine) -> Iterator[str]:
    yield (
        f"* this plan, whose pool of {plan.num_pages * plan.page_size} tokens serves several "
        "requests; the others have room for one."
    )
    yield "Speeds are predictions, with the context half full, from these assumptions:"
    yield (
        f"  the link copies {machine.link.copy_bytes_s / 1e9:.1f} GB/s and gathers "
        f"{machine.link.gather_bytes_s / 1e9:.1f} GB/s (--link)"
    )
    yield (
        f"  kernels read {machine.vram_bytes_s / 1e9:.0f} GB/s (--vram-rate) and reach "
        f"{machine.operations_s / 1e12:.0f} TFLOP/s in prompts (--tflops), no layer has a window"
    )
    yield "  uniform: a look-up of an expert hits with the share of experts that is resident"
    yield "  with locality, an LRU stack: it hits"
    yield (
        "    "
        + ", ".join(f"{hit * 100:.0f} % with {share * 100:.3g} %" for share, hit in LRU_STACK[1:5])
        + " resident"
    )


def _mib(num_bytes: int) -> str:
    return f"{-(-num_bytes // MIB):,}"
