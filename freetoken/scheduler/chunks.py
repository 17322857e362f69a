"""How the next steps' tokens are dealt among the rows that extend: on demand, or in a pass.

Plain functions on numbers. Rows come oldest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

SHORT_TOKENS = 64
"""A newcomer that extends by no more is served in the pauses of a pass: it could have its own pass
only when that one is over, and on demand it takes hardly longer than one at the threshold, since
most experts are asked for either way."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The worker's. `max_on_demand_tokens` None: no step is ever a pass."""

    max_step_tokens: int
    max_pass_tokens: int
    max_on_demand_tokens: int | None


def in_pause(limits: StepLimits) -> StepLimits:
    """What holds while a pass is open. A worker that passes always (threshold 0) does so still."""
    if not limits.max_on_demand_tokens:
        return limits
    shorts = min(SHORT_TOKENS, limits.max_step_tokens)
    return replace(limits, max_on_demand_tokens=max(limits.max_on_demand_tokens, shorts))


@dataclass(frozen=True, slots=True)
class Deal:
    """Tokens of the i-th extending row in the next on-demand step, or in the next pass."""

    on_demand: list[int]
    in_pass: list[int]


def deal(remaining: Sequence[int], limits: StepLimits) -> Deal:
    """Who goes which way, of rows with `remaining` tokens each (all >= 1).

    Where passes exist, extends that fit together into an on-demand step go there with the decode
    rows; the others go as a pass.
    """
    threshold = limits.max_on_demand_tokens
    if threshold is None:
        return Deal(share(remaining, limits.max_step_tokens), [0] * len(remaining))
    shorts = pick_shorts(remaining, min(threshold, limits.max_step_tokens))
    longs = [0 if short else tokens for tokens, short in zip(remaining, shorts, strict=True)]
    return Deal(shorts, fill(longs, limits.max_pass_tokens))


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
