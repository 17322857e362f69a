"""Kernels of a pass: a grouped product over pairs sorted by expert, and the gate by itself."""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.triton_experts import weight_rows
from freetoken.kernels.triton_gates import gate_value


@triton.jit
def tile_product_kernel(
    x_ptr, x_stride, w_ptr, w_stride, bias_ptr, bias_stride, out_ptr,
    pairs_ptr, ends_ptr, num_experts,
    MAX_EXPERTS: tl.constexpr, PAIRS_PER_X: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr,
    GATHERS: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_SHIFT: tl.constexpr,
    HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """out[i] = gate(W[e] · x + bias[e]) for the pairs i of expert e in sorted order.

    x is x[pairs[i] // PAIRS_PER_X] if GATHERS, else x[i]. A program has BM pairs of one expert.
    grid: (tiles of OUT, at least the sum of all experts' tiles): programs side by side share x,
    and those of one expert its weights, in the cache.
    """
    expert, first, last = _tile(tl.program_id(1), ends_ptr, num_experts, MAX_EXPERTS, BM)
    if first >= last:
        return
    m = first + tl.arange(0, BM)
    source = m.to(tl.int64)
    if GATHERS:
        source = tl.load(pairs_ptr + m, mask=m < last, other=0).to(tl.int64) // PAIRS_PER_X
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    gate_n, up_n = weight_rows(n, OUT, GATED, INTERLEAVED)
    w_row = w_ptr + expert.to(tl.int64) * w_stride
    gate_ptr = w_row + gate_n[None, :] * IN + k[:, None]
    up_ptr = w_row + up_n[None, :] * IN + k[:, None]
    x_tile = x_ptr + source[:, None] * x_stride + k[None, :]
    gate = tl.zeros((BM, BN), tl.float32)
    up = tl.zeros((BM, BN), tl.float32)
    for start in tl.range(0, IN, BK, num_stages=STAGES):
        x_inside = (m < last)[:, None] & (start + k < IN)[None, :]
        x = tl.load(x_tile + start, mask=x_inside, other=0.0)
        inside = (n < OUT)[None, :] & (start + k < IN)[:, None]
        w = tl.load(gate_ptr + start, mask=inside, other=0.0)
        gate = tl.dot(x, w, gate, input_precision="ieee")
        if GATED:
            w_up = tl.load(up_ptr + start, mask=inside, other=0.0)
            up = tl.dot(x, w_up, up, input_precision="ieee")
    if HAS_BIAS:
        bias_row = bias_ptr + expert.to(tl.int64) * bias_stride
        gate += tl.load(bias_row + gate_n, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_row + up_n, mask=n < OUT, other=0.0).to(tl.float32)[None, :]
    value = gate_value(gate, up, ACTIVATION, GATED, ALPHA, LIMIT, UP_SHIFT)
    tl.store(
        out_ptr + m.to(tl.int64)[:, None] * OUT + n[None, :],
        value.to(out_ptr.dtype.element_ty),
        mask=(m < last)[:, None] & (n < OUT)[None, :],
    )


@triton.jit
def gate_kernel(
    product_ptr, experts_ptr, bias_ptr, bias_stride, out_ptr, num_experts,
    OUT: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_SHIFT: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[i] = gate(product[i] + bias[experts[i]]). grid: (pairs, tiles of OUT)."""
    i = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = 2 * OUT if GATED else OUT
    gate, up = _halves(product_ptr + i * width, n, OUT, GATED, INTERLEAVED, BLOCK)
    if HAS_BIAS:
        # A skipped pair's number is E. Nobody reads its row, so that any bias will do.
        expert = tl.minimum(tl.load(experts_ptr + i).to(tl.int64), num_experts - 1)
        bias_row = bias_ptr + expert * bias_stride
        gate_bias, up_bias = _halves(bias_row, n, OUT, GATED, INTERLEAVED, BLOCK)
        gate += gate_bias
        up += up_bias
    value = gate_value(gate, up, ACTIVATION, GATED, ALPHA, LIMIT, UP_SHIFT)
    tl.store(out_ptr + i * OUT + n, value.to(out_ptr.dtype.element_ty), mask=n < OUT)


@triton.jit
def _halves(
    row_ptr, n, OUT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Gate and up of outputs n in one row, as fp32; without a gate the value twice."""
    if not GATED:
        value = tl.load(row_ptr + n, mask=n < OUT, other=0.0).to(tl.float32)
        return value, value
    elif INTERLEAVED:
        # Neighbours in memory are loaded together, then taken apart.
        both = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
        pair = tl.load(row_ptr + both, mask=both < 2 * OUT, other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(pair, (BLOCK, 2)))
        return gate, up
    else:
        gate = tl.load(row_ptr + n, mask=n < OUT, other=0.0).to(tl.float32)
        up = tl.load(row_ptr + OUT + n, mask=n < OUT, other=0.0).to(tl.float32)
        return gate, up


@triton.jit
def _tile(tile, ends_ptr, num_experts, MAX_EXPERTS: tl.constexpr, BM: tl.constexpr):
    """Expert and range of pairs of a tile; the range is empty behind the last tile."""
    numbers = tl.arange(0, MAX_EXPERTS)
    is_expert = numbers < num_experts
    ends = tl.load(ends_ptr + numbers, mask=is_expert, other=0)
    starts = tl.load(ends_ptr + numbers - 1, mask=is_expert & (numbers > 0), other=0)
    tiles = tl.where(is_expert, (ends - starts + BM - 1) // BM, 0)
    expert = tl.sum((is_expert & (tl.cumsum(tiles, 0) <= tile)).to(tl.int32), axis=0)
    tiles_before = tl.sum(tl.where(numbers < expert, tiles, 0), axis=0)
    start = tl.sum(tl.where(numbers == expert, starts, 0), axis=0)
    last = tl.sum(tl.where(numbers == expert, ends, 0), axis=0)
    first = start + (tile - tiles_before) * BM
    return expert, first, tl.where(expert < num_experts, last, first)
