"""The smallest logit of a row that passes top-k or top-p: what the sampling kernels share.

Both filters have one form: a token passes if what lies above its logit measures less than a target.
For top-k the measure counts tokens and the target is k; for top-p it adds weights and the target is
p times their sum. So equals pass together, and the threshold can be bisected.

A logit is a key here: its distance to the row's best (0 or below), as an integer of the same order.
A search knows that keys above `high` pass, which measure `above`, and that keys up to `low` do not;
the keys between, `high` included, are open. The best token passes in any case.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-0x7F800000)
"""The key of -inf."""


@triton.jit
def to_key(distance):
    """distance: f32, 0 or below → int32, in the same order."""
    return -(distance.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def from_key(key):
    return -((-key).to(tl.float32, bitcast=True))


@triton.jit
def measured(distance, temperature, BY_WEIGHT: tl.constexpr):
    """What a token adds to the measure, by its distance to the best."""
    measure = tl.where(distance <= 0.0, 1.0, 0.0)
    if BY_WEIGHT:
        measure = tl.exp(distance / temperature)
    return measure


@triton.jit
def bisect(x, is_there, best, temperature, low, high, above, target, BY_WEIGHT: tl.constexpr):
    """The threshold, with all logits that may be open in registers: x, where `is_there`."""
    key = to_key(x - best)
    is_open = is_there & (key > low) & (key <= high)
    measure = tl.where(is_open, measured(x - best, temperature, BY_WEIGHT), 0.0)
    while high - low > 1:
        middle = low + (high - low) // 2
        more = tl.sum(tl.where(key > middle, measure, 0.0), axis=0).to(tl.float64)
        passes = above + more < target
        high = tl.where(passes, middle, high)
        low = tl.where(passes, low, middle)
    return high


@triton.jit
def bisect_slowly(
    logits,
    vocab_size,
    best,
    temperature,
    low,
    high,
    above,
    target,
    BY_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The threshold, with a pass over the row for each bit of it."""
    while high - low > 1:
        middle = low + (high - low) // 2
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(logits + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
            key = to_key(x - best)
            is_above = (at < vocab_size) & (key > middle) & (key <= high)
            sums += tl.where(is_above, measured(x - best, temperature, BY_WEIGHT), 0.0)
        more = tl.sum(sums, axis=0).to(tl.float64)
        passes = above + more < target
        high = tl.where(passes, middle, high)
        above = tl.where(passes, above + more, above)
        low = tl.where(passes, low, middle)
    return high
