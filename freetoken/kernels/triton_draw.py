"""The kernels that draw a token, launched by triton_sample.py: of a short row in one program, of a
long one with a program per chunk for its extremes and its weights, and one that picks."""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton_search import finish, row_stats
from freetoken.kernels.triton_threshold import LOWEST_KEY, bisect, to_key


@triton.jit
def _chunk_stats(logits, temperature, start, vocab_size, CHUNK: tl.constexpr):
    """(largest logit, +inf if one is NaN; smallest finite one; weight relative to the largest;
    first token that has the largest)."""
    token = start + tl.arange(0, CHUNK)
    x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    best = tl.max(x, axis=0)
    lowest = tl.min(tl.where(x > float("-inf"), x, float("inf")), axis=0)
    first = tl.min(tl.where(x == best, token, vocab_size), axis=0)
    is_finite = tl.abs(best) < float("inf")
    weights = tl.exp((tl.where(is_finite, x, 0.0) - tl.where(is_finite, best, 0.0)) / temperature)
    return best, lowest, tl.where(is_finite, tl.sum(weights, axis=0), 0.0), first


@triton.jit(do_not_specialize=["num_rows"])
def stats_kernel(
    logits,
    temperature,
    stats,
    firsts,
    num_rows,
    vocab_size,
    stride,
    min_temperature,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """stats: [3, rows, NUM_CHUNKS] f32, firsts: [rows, NUM_CHUNKS] int32, see _chunk_stats."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    heat = tl.load(temperature + row)
    heat = tl.where(heat < min_temperature, 1.0, heat)
    best, lowest, weight, first = _chunk_stats(
        logits + row * stride, heat, chunk * CHUNK, vocab_size, CHUNK
    )
    size = num_rows.to(tl.int64) * NUM_CHUNKS
    place = row * NUM_CHUNKS + chunk
    tl.store(stats + place, best)
    tl.store(stats + size + place, lowest)
    tl.store(stats + 2 * size + place, weight)
    tl.store(firsts + place, first)


@triton.jit
def _kept_weights(x, best, heat, threshold, min_p):
    """The weights of tokens with logits x, 0 for those that do not pass the filters."""
    weights = tl.exp((x - best) / heat)
    return tl.where((to_key(x - best) >= threshold) & (weights >= min_p), weights, 0.0)


@triton.jit
def _pick(weights, token, target, otherwise):
    """The first token at which the running sum of the weights exceeds the target: f64."""
    running = tl.cumsum(weights.to(tl.float64), axis=0)
    chosen = tl.min(tl.where((running > target) & (weights > 0), token, 0x7FFFFFFF), axis=0)
    # Rounding may leave the target behind the last sum: then it is the last token with a weight.
    last = tl.max(tl.where(weights > 0, token, -1), axis=0)
    chosen = tl.where(chosen == 0x7FFFFFFF, last, chosen)
    return tl.where(chosen < 0, otherwise, chosen).to(tl.int64)


@triton.jit
def short_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    uniforms,
    tokens,
    vocab_size,
    stride,
    min_temperature,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    heat = tl.load(temperature + row)
    is_greedy = heat < min_temperature
    heat = tl.where(is_greedy, 1.0, heat)
    best, _, _, first = _chunk_stats(logits, heat, 0, vocab_size, BLOCK)
    is_sound = tl.abs(best) < float("inf")
    if is_greedy | (is_sound == 0):
        tl.store(tokens + row, tl.where(is_sound, first, -1).to(tl.int64))
        return
    token = tl.arange(0, BLOCK)
    is_token = token < vocab_size
    x = tl.load(logits + token, mask=is_token, other=float("-inf")).to(tl.float32)
    k = tl.minimum(tl.load(top_k + row), vocab_size)
    p = tl.load(top_p + row)
    threshold = LOWEST_KEY + tl.program_id(0) * 0
    high = tl.program_id(0) * 0
    above = p.to(tl.float64) * 0.0
    if k > 0:
        target = k.to(tl.float64)
        threshold = bisect(
            x, is_token, best, heat, threshold - 1, high, above, target, BY_WEIGHT=False
        )
    if p < 1.0:
        total = tl.sum(_kept_weights(x, best, heat, threshold, 0.0), axis=0)
        target = p.to(tl.float64) * total.to(tl.float64)
        threshold = bisect(
            x, is_token, best, heat, threshold - 1, high, above, target, BY_WEIGHT=True
        )
    weights = _kept_weights(x, best, heat, threshold, tl.load(min_p + row))
    target = tl.load(uniforms + row) * tl.sum(weights.to(tl.float64), axis=0)
    tl.store(tokens + row, _pick(weights, token, target, first))


@triton.jit(do_not_specialize=["num_rows"])
def kept_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    stats,
    buffer,
    k_ints,
    k_floats,
    p_ints,
    p_floats,
    kept,
    thresholds,
    num_rows,
    vocab_size,
    stride,
    min_temperature,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """kept: [rows, NUM_CHUNKS] f32, what passes the filters in each chunk · thresholds: [rows]."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    num_rows = num_rows.to(tl.int64)
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    least = tl.load(min_p + row)
    best, _, _ = row_stats(stats, num_rows, row, NUM_CHUNKS, BLOCK_CHUNKS)
    is_filtered = (k > 0) | (p < 1.0) | (least > 0)
    is_drawn = (heat >= min_temperature) & (tl.abs(best) < float("inf"))
    if (is_filtered & is_drawn) == 0:
        return
    logits += row * stride
    buffer += row * CAPACITY
    threshold = LOWEST_KEY + chunk * 0
    if p < 1.0:
        threshold = finish(
            logits, buffer, p_ints, p_floats, num_rows, row, vocab_size, best, heat, True, CAPACITY
        )
    elif k > 0:
        threshold = finish(
            logits, buffer, k_ints, k_floats, num_rows, row, vocab_size, best, heat, False, CAPACITY
        )
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    weights = _kept_weights(x, best, heat, threshold, least)
    tl.store(kept + row * NUM_CHUNKS + chunk, tl.sum(weights, axis=0))
    if chunk == 0:
        tl.store(thresholds + row, threshold)


@triton.jit(do_not_specialize=["num_rows"])
def pick_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    uniforms,
    stats,
    firsts,
    kept,
    thresholds,
    tokens,
    num_rows,
    vocab_size,
    stride,
    min_temperature,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    heat = tl.load(temperature + row)
    is_greedy = heat < min_temperature
    heat = tl.where(is_greedy, 1.0, heat)
    least = tl.load(min_p + row)
    index = tl.arange(0, BLOCK_CHUNKS)
    is_chunk = index < NUM_CHUNKS
    place = row * NUM_CHUNKS + index
    maxima = tl.load(stats + place, mask=is_chunk, other=float("-inf"))
    weights = tl.load(
        stats + 2 * num_rows.to(tl.int64) * NUM_CHUNKS + place, mask=is_chunk, other=0.0
    )
    places = tl.load(firsts + place, mask=is_chunk, other=vocab_size)
    best = tl.max(maxima, axis=0)
    first = tl.min(tl.where(maxima == best, places, vocab_size), axis=0)
    is_sound = tl.abs(best) < float("inf")
    if is_greedy | (is_sound == 0):
        tl.store(tokens + row, tl.where(is_sound, first, -1).to(tl.int64))
        return
    threshold = LOWEST_KEY + tl.program_id(0) * 0
    if (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1.0) | (least > 0):
        threshold = tl.load(thresholds + row)
        sums = tl.load(kept + place, mask=is_chunk, other=0.0)
    else:
        sums = weights * tl.exp(tl.where(weights > 0, maxima - best, 0.0) / heat)
    sums = sums.to(tl.float64)
    target = tl.load(uniforms + row) * tl.sum(sums, axis=0)
    running = tl.cumsum(sums, axis=0)
    last = tl.max(tl.where(sums > 0, index, 0), axis=0)
    chunk = tl.min(tl.where((running > target) & (sums > 0), index, last), axis=0)
    target -= tl.sum(tl.where(index < chunk, sums, 0.0), axis=0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    weights = _kept_weights(x, best, heat, threshold, least)
    tl.store(tokens + row, _pick(weights, token, target, first))
