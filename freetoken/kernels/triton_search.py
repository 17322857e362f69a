"""The search for a long row's threshold by many programs; launched by triton_sample.py.

Three launches, each one program per chunk of a row. Two of them measure the chunk above NUM_PIVOTS
pivots, which lie evenly in the open range of values. Of 151936 logits, normal or with long tails,
they leave at most 1800 open. The third copies these to a buffer, where whoever needs the threshold
finds it (`finish`). Where too many are left, as among equals, it goes over the row instead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton_threshold import (
    LOWEST_KEY,
    bisect,
    bisect_slowly,
    from_key,
    measured,
    to_key,
)

NUM_PIVOTS = tl.constexpr(16)
PIVOT, COPY = tl.constexpr(1), tl.constexpr(2)
"""Stages of a search; stage 0 is the first to measure."""


@triton.jit
def row_stats(stats, num_rows, row, NUM_CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):
    """(best logit of the row, +inf if one is NaN; smallest finite one; smallest best of a chunk)
    from stats [3, num_rows, NUM_CHUNKS]."""
    index = tl.arange(0, BLOCK_CHUNKS)
    place = stats + row * NUM_CHUNKS + index
    is_chunk = index < NUM_CHUNKS
    maxima = tl.load(place, mask=is_chunk, other=float("-inf"))
    minima = tl.load(place + num_rows * NUM_CHUNKS, mask=is_chunk, other=float("inf"))
    is_some = is_chunk & (maxima > float("-inf"))
    worst = tl.min(tl.where(is_some, maxima, float("inf")), axis=0)
    return tl.max(maxima, axis=0), tl.min(minima, axis=0), worst


@triton.jit
def _choose_pivots(low, high, bottom):
    """[NUM_PIVOTS] int32, falling, the last one `low`; evenly from `high` to `bottom` in value."""
    rank = tl.arange(0, NUM_PIVOTS)
    top = from_key(high)
    step = (from_key(tl.maximum(low, bottom)) - top) / NUM_PIVOTS
    key = to_key(tl.minimum(top + step * (rank + 1).to(tl.float32), 0.0))
    key = tl.minimum(tl.maximum(key, low + 1), high - 1)
    return tl.where(rank == NUM_PIVOTS - 1, low, key)


@triton.jit
def _save(ints, floats, num_rows, row, stage, low, high, num_open, above, target):
    place = (stage * num_rows + row) * 3
    tl.store(ints + place, low)
    tl.store(ints + place + 1, high)
    tl.store(ints + place + 2, num_open)
    place = (stage * num_rows + row) * 2
    tl.store(floats + place, above)
    tl.store(floats + place + 1, target)


@triton.jit
def finish(
    logits,
    buffer,
    ints,
    floats,
    num_rows,
    row,
    vocab_size,
    best,
    heat,
    BY_WEIGHT: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """int32: the threshold of a row whose search has gone through all its stages."""
    place = ints + (COPY * num_rows + row) * 3
    low = tl.load(place)
    high = tl.load(place + 1)
    num_open = tl.load(place + 2)
    place = floats + (COPY * num_rows + row) * 2
    above = tl.load(place)
    target = tl.load(place + 1)
    if num_open <= CAPACITY:
        at = tl.arange(0, CAPACITY)
        x = tl.load(buffer + at, mask=at < num_open, other=float("-inf")).to(tl.float32)
        high = bisect(x, at < num_open, best, heat, low, high, above, target, BY_WEIGHT)
    else:
        high = bisect_slowly(
            logits, vocab_size, best, heat, low, high, above, target, BY_WEIGHT, CAPACITY
        )
    return high


@triton.jit(do_not_specialize=["num_rows"])
def search_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    stats,
    buffer,
    pivots,
    counts,
    measures,
    k_ints,
    k_floats,
    p_ints,
    p_floats,
    num_rows,
    vocab_size,
    stride,
    min_temperature,
    STAGE: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """A stage of the search for the threshold of top-p (BY_WEIGHT) or top-k.

    buffer: [rows, CAPACITY] · pivots: [2, rows, NUM_PIVOTS] int32 · counts, measures: of what is
    open above each pivot, [2, rows, NUM_CHUNKS, NUM_PIVOTS] int32 and f32 · ints, floats: a row's
    state before each stage, [3, rows, 3] int32 and [3, rows, 2] f64, see _save.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    num_rows = num_rows.to(tl.int64)
    heat = tl.load(temperature + row)
    k = tl.minimum(tl.load(top_k + row), vocab_size)
    p = tl.load(top_p + row)
    best, lowest, worst = row_stats(stats, num_rows, row, NUM_CHUNKS, BLOCK_CHUNKS)
    is_asked = (heat >= min_temperature) & (tl.abs(best) < float("inf"))
    if BY_WEIGHT:
        is_asked &= p < 1.0
    else:
        is_asked &= k > 0
    if is_asked == 0:
        return
    logits += row * stride
    buffer += row * CAPACITY
    index = tl.arange(0, BLOCK_CHUNKS)
    rank = tl.arange(0, NUM_PIVOTS)
    bottom = lowest - best
    ints, floats = k_ints, k_floats
    if BY_WEIGHT:
        ints, floats = p_ints, p_floats
    if STAGE == 0:
        low = LOWEST_KEY - 1 + chunk * 0
        high = chunk * 0
        above = k.to(tl.float64) * 0.0
        target = k.to(tl.float64)
        if BY_WEIGHT:
            if k > 0:
                low = -1 + finish(
                    logits,
                    buffer,
                    k_ints,
                    k_floats,
                    num_rows,
                    row,
                    vocab_size,
                    best,
                    heat,
                    BY_WEIGHT=False,
                    CAPACITY=CAPACITY,
                )
            # Lower logits have no weight.
            bottom = tl.maximum(bottom, -104.0 * heat)
        # Single logits far below all others must not make the steps wide.
        if worst < best:
            bottom = tl.maximum(bottom, 8.0 * (worst - best))
        num_open = vocab_size + chunk * 0
        open_counts = index * 0
    else:
        last = (STAGE - 1) * num_rows + row
        low = tl.load(ints + last * 3)
        high = tl.load(ints + last * 3 + 1)
        above = tl.load(floats + last * 2)
        target = tl.load(floats + last * 2 + 1)
        pivot = tl.load(pivots + last * NUM_PIVOTS + rank)
        place = (last * NUM_CHUNKS + index)[:, None] * NUM_PIVOTS + rank[None, :]
        is_chunk = (index < NUM_CHUNKS)[:, None]
        count = tl.load(counts + place, mask=is_chunk, other=0)
        totals = tl.sum(count, axis=0).to(tl.float64)
        if BY_WEIGHT:
            measure = tl.load(measures + place, mask=is_chunk, other=0.0)
            totals = tl.sum(measure.to(tl.float64), axis=0)
            if STAGE == PIVOT:
                target = p.to(tl.float64) * tl.max(totals, axis=0)
        # The pivots fall, so those that pass come first; `low`, the last, does not.
        passes = (above + totals < target) & (rank < NUM_PIVOTS - 1)
        num_passed = tl.sum(passes.to(tl.int32), axis=0)
        is_last = rank == num_passed - 1
        high = tl.where(num_passed > 0, tl.sum(tl.where(is_last, pivot, 0), axis=0), high)
        above += tl.sum(tl.where(is_last, totals, 0.0), axis=0)
        low = tl.sum(tl.where(rank == num_passed, pivot, 0), axis=0)
        sign = (rank == num_passed).to(tl.int32) - is_last.to(tl.int32)
        open_counts = tl.sum(count * sign[None, :], axis=1)
        num_open = tl.sum(open_counts, axis=0)
    if chunk == 0:
        _save(ints, floats, num_rows, row, STAGE, low, high, num_open, above, target)

    if STAGE < COPY:
        pivot = _choose_pivots(low, high, to_key(bottom))
        this = STAGE * num_rows + row
        if chunk == 0:
            tl.store(pivots + this * NUM_PIVOTS + rank, pivot)
        count_sums = tl.zeros([NUM_PIVOTS, PIECE], tl.int32)
        sums = tl.zeros([NUM_PIVOTS, PIECE], tl.float32)
        # Unrolled, so that all loads are on their way before the first is used.
        for piece in tl.static_range(CHUNK // PIECE):
            at = chunk * CHUNK + piece * PIECE + tl.arange(0, PIECE)
            x = tl.load(logits + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
            key = to_key(x - best)
            is_open = (at < vocab_size) & (key <= high)
            is_above = is_open[None, :] & (key[None, :] > pivot[:, None])
            count_sums += is_above.to(tl.int32)
            if BY_WEIGHT:
                weight = measured(x - best, heat, True)
                sums += tl.where(is_above, weight[None, :], 0.0)
        place = (this * NUM_CHUNKS + chunk) * NUM_PIVOTS + rank
        tl.store(counts + place, tl.sum(count_sums, axis=1))
        if BY_WEIGHT:
            tl.store(measures + place, tl.sum(sums, axis=1))
    elif num_open <= CAPACITY:
        at = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + at, mask=at < vocab_size, other=float("-inf"))
        key = to_key(x.to(tl.float32) - best)
        is_open = (at < vocab_size) & (key > low) & (key <= high)
        first = tl.sum(tl.where(index < chunk, open_counts, 0), axis=0)
        seat = first + tl.cumsum(is_open.to(tl.int32), axis=0) - 1
        tl.store(buffer + seat, x, mask=is_open)
