"""Draws one token for each row of logits, whatever its filters. See sample_ops.sample.

A short row is one program's work. For a longer one, one program per chunk finds the chunk's
extremes and its weight, and a second launch does the rest: it picks the chunk in which the running
sum passes the drawn share, and reads only that. A filtered row first looks for the smallest logit
that passes (triton_threshold.py) and sums the chunks again.

Tokens are equals here if their logits are; in the reference, if they are so after the division by
the temperature, which can make one of two neighbouring numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.reference_sample import MIN_TEMPERATURE
from freetoken.kernels.triton_threshold import LOWEST_KEY, find_threshold, to_key

SHORT_ROW = 8192
"""A row of so many logits is one chunk."""
CHUNK = 4096
SEARCH = 8192
"""Logits that a program looks at together while it searches for the threshold."""
CAPACITY = 32768
"""Undecided logits are copied to a buffer of so many once they fit."""


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> Tensor:
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return tokens
    is_short = vocab_size <= SHORT_ROW
    chunk = max(16, triton.next_power_of_2(vocab_size)) if is_short else CHUNK
    num_chunks = triton.cdiv(vocab_size, chunk)
    stats, firsts, buffer = None, None, None
    if not is_short:
        stats = logits.new_empty((3, num_rows, num_chunks), dtype=torch.float32)
        firsts = logits.new_empty((num_rows, num_chunks), dtype=torch.int32)
        buffer = logits.new_empty((num_rows, CAPACITY))
        _stats_kernel[(num_rows, num_chunks)](
            logits,
            temperature,
            stats,
            firsts,
            vocab_size,
            logits.stride(0),
            MIN_TEMPERATURE,
            NUM_CHUNKS=num_chunks,
            CHUNK=chunk,
            num_warps=8,
        )
    _pick_kernel[(num_rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        uniforms,
        stats,
        firsts,
        buffer,
        tokens,
        vocab_size,
        logits.stride(0),
        MIN_TEMPERATURE,
        NUM_CHUNKS=num_chunks,
        BLOCK_CHUNKS=triton.next_power_of_2(num_chunks),
        CHUNK=chunk,
        SEARCH=chunk if is_short else SEARCH,
        CAPACITY=CAPACITY,
        num_warps=min(16, max(1, chunk // 256)),
        num_stages=1,
    )
    return tokens


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


@triton.jit
def _stats_kernel(
    logits,
    temperature,
    stats,
    firsts,
    vocab_size,
    stride,
    min_temperature,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    heat = tl.load(temperature + row)
    heat = tl.where(heat < min_temperature, 1.0, heat)
    best, lowest, weight, first = _chunk_stats(
        logits + row * stride, heat, chunk * CHUNK, vocab_size, CHUNK
    )
    size = tl.num_programs(0).to(tl.int64) * NUM_CHUNKS
    place = row * NUM_CHUNKS + chunk
    tl.store(stats + place, best)
    tl.store(stats + size + place, lowest)
    tl.store(stats + 2 * size + place, weight)
    tl.store(firsts + place, first)


@triton.jit
def _kept_weights(x, best, temperature, threshold, min_p):
    """The weights of tokens with logits x, 0 for those that do not pass the filters."""
    weights = tl.exp((x - best) / temperature)
    return tl.where((to_key(x - best) >= threshold) & (weights >= min_p), weights, 0.0)


@triton.jit
def _kept_sums(
    logits,
    vocab_size,
    best,
    temperature,
    threshold,
    min_p,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """[BLOCK_CHUNKS] f64: what passes the filters in each chunk."""
    step: tl.constexpr = 4 if BLOCK_CHUNKS >= 4 else 1
    index = tl.arange(0, BLOCK_CHUNKS)
    sums = tl.zeros([BLOCK_CHUNKS], tl.float64)
    for first in range(0, NUM_CHUNKS, step):
        chunk = first + tl.arange(0, step)
        token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        kept = tl.sum(_kept_weights(x, best, temperature, threshold, min_p), axis=1)
        placed = tl.where(index[:, None] == chunk[None, :], kept[None, :], 0.0)
        sums += tl.sum(placed, axis=1).to(tl.float64)
    return sums


@triton.jit
def _pick_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    uniforms,
    stats,
    firsts,
    buffer,
    tokens,
    vocab_size,
    stride,
    min_temperature,
    NUM_CHUNKS: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    SEARCH: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    if buffer is not None:
        buffer += row * CAPACITY
    heat = tl.load(temperature + row)
    is_greedy = heat < min_temperature
    heat = tl.where(is_greedy, 1.0, heat)
    index = tl.arange(0, BLOCK_CHUNKS)
    if NUM_CHUNKS == 1:
        best, lowest, weight, first = _chunk_stats(logits, heat, 0, vocab_size, CHUNK)
        sums = tl.zeros([BLOCK_CHUNKS], tl.float64) + weight.to(tl.float64)
    else:
        size = tl.num_programs(0).to(tl.int64) * NUM_CHUNKS
        place = row * NUM_CHUNKS + index
        is_chunk = index < NUM_CHUNKS
        maxima = tl.load(stats + place, mask=is_chunk, other=float("-inf"))
        minima = tl.load(stats + size + place, mask=is_chunk, other=float("inf"))
        weights = tl.load(stats + 2 * size + place, mask=is_chunk, other=0.0)
        places = tl.load(firsts + place, mask=is_chunk, other=vocab_size)
        best = tl.max(maxima, axis=0)
        lowest = tl.min(minima, axis=0)
        first = tl.min(tl.where(maxima == best, places, vocab_size), axis=0)
        below = tl.where(weights > 0, maxima - tl.where(weights > 0, best, 0.0), 0.0)
        sums = (weights * tl.exp(below / heat)).to(tl.float64)

    is_sound = tl.abs(best) < float("inf")
    if is_greedy | (is_sound == 0):
        tl.store(tokens + row, tl.where(is_sound, first, -1).to(tl.int64))
        return

    k = tl.minimum(tl.load(top_k + row), vocab_size)
    p = tl.load(top_p + row)
    least = tl.load(min_p + row)
    threshold = LOWEST_KEY + tl.program_id(0) * 0
    if (k > 0) | (p < 1.0) | (least > 0):
        if k > 0:
            threshold = find_threshold(
                logits,
                buffer,
                vocab_size,
                best,
                lowest,
                heat,
                threshold,
                k.to(tl.float64),
                BY_WEIGHT=False,
                SEARCH=SEARCH,
                CAPACITY=CAPACITY,
            )
        if p < 1.0:
            if k > 0:
                sums = _kept_sums(
                    logits, vocab_size, best, heat, threshold, 0.0, NUM_CHUNKS, BLOCK_CHUNKS, CHUNK
                )
            threshold = find_threshold(
                logits,
                buffer,
                vocab_size,
                best,
                lowest,
                heat,
                threshold,
                tl.sum(sums, axis=0) * p.to(tl.float64),
                BY_WEIGHT=True,
                SEARCH=SEARCH,
                CAPACITY=CAPACITY,
            )
        sums = _kept_sums(
            logits, vocab_size, best, heat, threshold, least, NUM_CHUNKS, BLOCK_CHUNKS, CHUNK
        )

    target = tl.load(uniforms + row) * tl.sum(sums, axis=0)
    start = 0
    if NUM_CHUNKS > 1:
        running = tl.cumsum(sums, axis=0)
        last = tl.max(tl.where(sums > 0, index, 0), axis=0)
        chunk = tl.min(tl.where((running > target) & (sums > 0), index, last), axis=0)
        target -= tl.sum(tl.where(index < chunk, sums, 0.0), axis=0)
        start = chunk * CHUNK
    token = start + tl.arange(0, CHUNK)
    x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    weights = _kept_weights(x, best, heat, threshold, least)
    running = tl.cumsum(weights.to(tl.float64), axis=0)
    # Rounding may leave the target behind the last sum: then it is the last token with a weight.
    last = tl.max(tl.where(weights > 0, token, -1), axis=0)
    chosen = tl.min(tl.where((running > target) & (weights > 0), token, vocab_size), axis=0)
    chosen = tl.where(chosen == vocab_size, last, chosen)
    tl.store(tokens + row, tl.where(chosen < 0, first, chosen).to(tl.int64))
