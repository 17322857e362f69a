"""How one step's tokens are dealt among the rows that extend, and which mode the step has.

Plain functions on numbers. Rows come oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from freetoken.wire.messages import StepMode


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The worker's. `max_on_demand_tokens` None: no step is ever a pass."""

    max_step_tokens: int
    max_pass_tokens: int
    max_on_demand_tokens: int | None


@dataclass(frozen=True, slots=True)
class Deal:
    """A step: `chunks[i]` tokens for the i-th extending row; decode rows ride along or not."""

    mode: StepMode
    chunks: list[int]
    with_decodes: bool


def deal(
    remaining: Sequence[int], has_decodes: bool, last_mode: StepMode, limits: StepLimits
) -> Deal:
    """The next step for rows with `remaining` tokens each (all >= 1).

    Where passes exist, extends that fit together into an on-demand step go there with the decode
    rows; the others go as a pass, and between two passes comes an on-demand step.
    """
    threshold = limits.max_on_demand_tokens
    if threshold is None:
        chunks = share(remaining, limits.max_step_tokens)
        return Deal(StepMode.ON_DEMAND, chunks, True)
    shorts = pick_shorts(remaining, min(threshold, limits.max_step_tokens))
    has_longs = any(not short for short in shorts)
    has_on_demand = has_decodes or any(shorts)
    if not has_longs or (last_mode is StepMode.PASS and has_on_demand):
        return Deal(StepMode.ON_DEMAND, shorts, True)
    longs = [0 if short else tokens for tokens, short in zip(remaining, shorts, strict=True)]
    return Deal(StepMode.PASS, fill(longs, limits.max_pass_tokens), False)


def share(remaining: Sequence[int], budget: int) -> list[int]:
    """Oldest first, but up to half of the budget goes to rows that it completes, shortest first:
    a short newcomer does not wait for a long prompt, and the oldest always moves on."""
    if sum(remaining) <= budget:
        return list(remaining)
    chunks = pick_shorts(remaining, budget // 2)
    left = budget - sum(chunks)
    rest = fill([t - c for t, c in zip(remaining, chunks, strict=True)], left)
    return [chunk + more for chunk, more in zip(chunks, rest, strict=True)]


def pick_shorts(remaining: Sequence[int], budget: int) -> list[int]:
    """Complete rows, shortest first, while their sum is within `budget`; 0 for the others."""
    chunks = [0] * len(remaining)
    for tokens, i in sorted((tokens, i) for i, tokens in enumerate(remaining)):
        if tokens > budget:
            break
        chunks[i] = tokens
        budget -= tokens
    return chunks


def fill(remaining: Sequence[int], budget: int) -> list[int]:
    """Oldest first, each as much as it can use."""
    chunks = []
    for tokens in remaining:
        chunk = min(tokens, budget)
        chunks.append(chunk)
        budget -= chunk
    return chunks
