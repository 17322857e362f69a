"""Draws one token for each row of logits, whatever its filters. See sample_ops.sample.

A short row is one program's work. For a longer one, one program per chunk finds the chunk's
extremes and its weight; if the row is filtered, others find the smallest logit that passes
(triton_search.py) and weigh the chunks again. The last launch picks the chunk in which the running
sum passes the drawn share, and reads only that. All launches are always made, since nothing may
depend on values in a CUDA graph; programs without work leave at once.

Tokens are equals here if their logits are; in the reference, if they are so after the division by
the temperature, which can make one of two neighbouring numbers.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from freetoken.kernels.reference_sample import MIN_TEMPERATURE
from freetoken.kernels.triton_draw import kept_kernel, pick_kernel, short_kernel, stats_kernel
from freetoken.kernels.triton_search import NUM_PIVOTS, search_kernel

SHORT_ROW = 8192
"""A row of so many logits is one chunk."""
CHUNK = 4096
CAPACITY = 4096
"""Of the buffer for logits that a search leaves open; they fit in the registers of a program."""


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
    filters = (top_k, top_p, min_p)
    if vocab_size <= SHORT_ROW:
        block = max(16, triton.next_power_of_2(vocab_size))
        short_kernel[(num_rows,)](
            logits,
            temperature,
            *filters,
            uniforms,
            tokens,
            vocab_size,
            logits.stride(0),
            MIN_TEMPERATURE,
            BLOCK=block,
            num_warps=min(16, max(1, block // 256)),
        )
    else:
        _sample_long(logits, temperature, filters, uniforms, tokens)
    return tokens


def _sample_long(
    logits: Tensor,
    temperature: Tensor,
    filters: tuple[Tensor, Tensor, Tensor],
    uniforms: Tensor,
    tokens: Tensor,
) -> None:
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    grid = (num_rows, num_chunks)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    stats = empty(3, num_rows, num_chunks, dtype=torch.float32)
    firsts = empty(num_rows, num_chunks, dtype=torch.int32)
    kept = empty(num_rows, num_chunks, dtype=torch.float32)
    thresholds = empty(num_rows, dtype=torch.int32)
    buffer = empty(num_rows, CAPACITY, dtype=logits.dtype)
    # Each a tensor of its own: the start of a part is aligned or not by the number of rows, and
    # both would be compiled.
    ints = [empty(3, num_rows, 3, dtype=torch.int32) for _ in range(2)]
    floats = [empty(3, num_rows, 2, dtype=torch.float64) for _ in range(2)]
    sizes = (num_rows, vocab_size, logits.stride(0), MIN_TEMPERATURE)
    chunks = {
        "NUM_CHUNKS": num_chunks,
        "BLOCK_CHUNKS": triton.next_power_of_2(num_chunks),
        "CHUNK": CHUNK,
        "num_warps": 8,
    }
    stats_kernel[grid](logits, temperature, stats, firsts, *sizes, **chunks)
    states = (ints[0], floats[0], ints[1], floats[1])
    pivots = empty(2, num_rows, NUM_PIVOTS.value, dtype=torch.int32)
    counts = empty(2, *grid, NUM_PIVOTS.value, dtype=torch.int32)
    measures = empty(2, *grid, NUM_PIVOTS.value, dtype=torch.float32)
    for by_weight in (False, True):
        for stage in range(3):
            search_kernel[grid](
                logits,
                temperature,
                *filters[:2],
                stats,
                buffer,
                pivots,
                counts,
                measures,
                *states,
                *sizes,
                STAGE=stage,
                BY_WEIGHT=by_weight,
                PIECE=min(256, CHUNK),
                CAPACITY=CAPACITY,
                **chunks,
            )
    kept_kernel[grid](
        logits,
        temperature,
        *filters,
        stats,
        buffer,
        *states,
        kept,
        thresholds,
        *sizes,
        CAPACITY=CAPACITY,
        **chunks,
    )
    pick_kernel[(num_rows,)](
        logits,
        temperature,
        *filters,
        uniforms,
        stats,
        firsts,
        kept,
        thresholds,
        tokens,
        *sizes,
        **chunks,
    )
