"""The k largest of short rows: one program a row, which takes the maximum k times.

See sample_ops.top_k. A router's row fits in the registers of one warp; torch.topk takes 9 µs for
one row (H200, 2026-12-01), most of them launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COLUMNS = 1024
MAX_K = 64


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = scores.shape
    assert 0 < k <= min(num_columns, MAX_K), (k, num_columns)
    assert num_columns <= MAX_COLUMNS, num_columns
    values = torch.empty((num_rows, k), dtype=scores.dtype, device=scores.device)
    ids = torch.empty((num_rows, k), dtype=torch.int64, device=scores.device)
    if num_rows:
        block = triton.next_power_of_2(num_columns)
        _top_k_kernel[(num_rows,)](
            scores,
            values,
            ids,
            *scores.stride(),
            E=num_columns,
            K=k,
            BLOCK_E=block,
            BLOCK_K=triton.next_power_of_2(k),
            num_warps=max(1, block // 512),
        )
    return values, ids


@triton.jit
def _top_k_kernel(
    scores,
    values,
    ids,
    stride,
    column_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_E)
    x = tl.load(scores + row * stride + column * column_stride, mask=column < E, other=0.0)
    x = x.to(tl.float32)
    x = tl.where(x == 0.0, 0.0, x)  # -0 equals 0
    bits = x.to(tl.int32, bitcast=True)
    # Integers in the order of the floats, NaN last; below them the column, the lowest first.
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(x != x, 0x7FFFFFFF, order)
    keys = (order.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
    lowest: tl.constexpr = -(2**63)
    keys = tl.where(column < E, keys, lowest)
    rank = tl.arange(0, BLOCK_K)
    chosen = tl.zeros([BLOCK_K], tl.int64)
    for i in range(K):
        best = tl.max(keys, axis=0)
        chosen = tl.where(rank == i, best, chosen)
        keys = tl.where(keys == best, lowest, keys)
    index = 0x7FFFFFFF - (chosen & 0x7FFFFFFF)
    order = (chosen >> 32).to(tl.int32)
    bits = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
    value = bits.to(tl.float32, bitcast=True)
    tl.store(ids + row * K + rank, index, mask=rank < K)
    tl.store(values + row * K + rank, value.to(values.dtype.element_ty), mask=rank < K)
