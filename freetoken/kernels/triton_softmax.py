"""Pieces of the attention kernels: a step of the running softmax, and the softcap."""

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
def capped(scores, softcap, HAS_CAP: tl.constexpr):
    """softcap · tanh(scores / softcap); tanh by exp, since libdevice has no interpreter."""
    if HAS_CAP:
        scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0))
    return scores
