"""The smallest logit of a row that passes top-k or top-p, by bisection; called by triton_sample.py.

Both filters have one form: a token passes if what lies above its logit measures less than a target.
For top-k the measure counts tokens and the target is k; for top-p it adds weights and the target is
p times their sum. So equals pass together.

A logit is a key here: its distance to the row's best (0 or below), as an integer of the same order.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-0x7F800000)
"""The key of -inf."""
VALUE_TRIES = tl.constexpr(6)
"""So often the bracket is cut at the middle of its values, which suits what logits look like; then
at the middle of its keys, which ends after 31 cuts whatever they are."""


@triton.jit
def to_key(distance):
    """distance: f32, 0 or below → int32, in the same order."""
    return -(distance.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def _from_key(key):
    return -((-key).to(tl.float32, bitcast=True))


@triton.jit
def _pivot(low, high, lowest, tries):
    """A key in [low + 1, high - 1]; lowest: the key of the smallest finite logit."""
    value = 0.5 * (_from_key(tl.maximum(low, lowest)) + _from_key(high))
    middle = low + (high - low) // 2
    pivot = tl.where(tries < VALUE_TRIES, to_key(value), middle)
    return tl.minimum(tl.maximum(pivot, low + 1), high - 1)


@triton.jit
def _measure(distance, temperature, BY_WEIGHT: tl.constexpr):
    measure = tl.where(distance <= 0.0, 1.0, 0.0)
    if BY_WEIGHT:
        measure = tl.exp(distance / temperature)
    return measure


@triton.jit
def _count_open(
    source,
    size,
    best,
    temperature,
    low,
    high,
    pivot,
    BY_WEIGHT: tl.constexpr,
    SEARCH: tl.constexpr,
):
    """Of the logits with keys in (low, high]: how many there are, how many lie above the pivot, and
    what these measure. Threads meet only at the end, so that many loads are in flight."""
    open_counts = tl.zeros([SEARCH], tl.int32)
    above_counts = tl.zeros([SEARCH], tl.int32)
    measures = tl.zeros([SEARCH], tl.float32)
    for start in range(0, size, SEARCH):
        at = start + tl.arange(0, SEARCH)
        x = tl.load(source + at, mask=at < size, other=float("-inf")).to(tl.float32)
        key = to_key(x - best)
        is_open = (at < size) & (key > low) & (key <= high)
        is_above = is_open & (key > pivot)
        open_counts += is_open.to(tl.int32)
        above_counts += is_above.to(tl.int32)
        measures += tl.where(is_above, _measure(x - best, temperature, BY_WEIGHT), 0.0)
    measure = tl.sum(measures, axis=0).to(tl.float64)
    return tl.sum(open_counts, axis=0), tl.sum(above_counts, axis=0), measure


@triton.jit
def _copy_open(source, buffer, size, best, low, high, SEARCH: tl.constexpr):
    """Copy the logits with keys in (low, high] to the buffer, which may be the source.

    In place: the scan makes all threads wait for all loads of a block, and what is written then
    lies in this block or before it.
    """
    count = size * 0
    for start in range(0, size, SEARCH):
        at = start + tl.arange(0, SEARCH)
        x = tl.load(source + at, mask=at < size, other=float("-inf"))
        key = to_key(x.to(tl.float32) - best)
        is_open = (at < size) & (key > low) & (key <= high)
        place = count + tl.cumsum(is_open.to(tl.int32), axis=0) - 1
        tl.store(buffer + place, x, mask=is_open)
        count += tl.sum(is_open.to(tl.int32), axis=0)
    tl.debug_barrier()


@triton.jit
def find_threshold(
    logits,
    buffer,
    vocab_size,
    best,
    lowest,
    temperature,
    floor,
    target,
    BY_WEIGHT: tl.constexpr,
    SEARCH: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """int32: the smallest key, not below `floor`, above which the row measures less than `target`.

    logits: pointer to the row · buffer: to CAPACITY of its type, None if the row has at most SEARCH
    logits · best, lowest: its largest and smallest finite logit · target: f64.
    The best token passes in any case.
    """
    # Keys above `high` are known to pass, with `above` their measure; those up to `low` fail.
    low = floor - 1
    high = floor * 0
    above = target * 0.0
    source = logits
    size = vocab_size + floor * 0
    if buffer is not None:
        lowest_key = to_key(lowest - best)
        tries = floor * 0
        while (size > SEARCH) & (high - low > 1):
            pivot = _pivot(low, high, lowest_key, tries)
            num_open, num_above, more = _count_open(
                source, size, best, temperature, low, high, pivot, BY_WEIGHT, SEARCH
            )
            passes = above + more < target
            high = tl.where(passes, pivot, high)
            above = tl.where(passes, above + more, above)
            low = tl.where(passes, low, pivot)
            num_open = tl.where(passes, num_open - num_above, num_above)
            if num_open <= CAPACITY:
                _copy_open(source, buffer, size, best, low, high, SEARCH)
                source = buffer
                size = num_open
            tries += 1

    # Few enough to stay in registers (or no choice is left: all open keys are `high`).
    at = tl.arange(0, SEARCH)
    x = tl.load(source + at, mask=at < size, other=float("-inf")).to(tl.float32)
    key = to_key(x - best)
    is_open = (at < size) & (key > low) & (key <= high)
    measure = tl.where(is_open, _measure(x - best, temperature, BY_WEIGHT), 0.0)
    known = above
    while high - low > 1:
        middle = low + (high - low) // 2
        more = tl.sum(tl.where(key > middle, measure, 0.0), axis=0).to(tl.float64)
        passes = known + more < target
        high = tl.where(passes, middle, high)
        low = tl.where(passes, low, middle)
    return high
