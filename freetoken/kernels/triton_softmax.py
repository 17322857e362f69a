"""Pieces of the attention kernels: scores and a step of the running softmax."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
"""Scores are multiplied by it, so that exp becomes exp2, which the hardware has."""


@triton.jit
def softmax_step(scores, m):
    """scores [M, N], base 2 · m [M], the largest so far → (weights [M, N], what the sums so far
    shrink by [M], the new m). Lines that see nothing yet keep m = -inf and weights of 0."""
    new = tl.maximum(m, tl.max(scores, axis=1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    return tl.exp2(scores - safe[:, None]), tl.exp2(m - safe), new


@triton.jit
def to_scores(products, scaling, softcap, HAS_CAP: tl.constexpr):
    """q·k → scores in base 2. tanh is made of exp, since libdevice has no interpreter."""
    if HAS_CAP:
        share = 1.0 - 2.0 / (tl.exp(products * (2.0 * scaling / softcap)) + 1.0)
        scores = share * (softcap * LOG2E)
    else:
        scores = products * (scaling * LOG2E)
    return scores
