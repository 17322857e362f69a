"""Writes the k/v of new tokens to the paged pools: one launch for both, slots found inside.

See attention_ops.store_kv and store_kv_paged. One program per token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def store_kv(key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    _launch(key, value, k_pool, v_pool, slots, None, None, None, None)


def store_kv_paged(
    key: Tensor,
    value: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    num_tokens: Tensor | None,
) -> None:
    assert page_table.stride(1) == 1
    _launch(key, value, k_pool, v_pool, None, page_table, rows, positions, num_tokens)


def _launch(
    key: Tensor,
    value: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor | None,
    page_table: Tensor | None,
    rows: Tensor | None,
    positions: Tensor | None,
    num_tokens: Tensor | None,
) -> None:
    num_pages, page_size, num_heads, k_size = k_pool.shape
    v_size = v_pool.shape[-1]
    assert key.shape[1:] == (num_heads, k_size)
    assert value.shape[1:] == (num_heads, v_size)
    assert key.stride(2) == 1
    assert value.stride(2) == 1
    assert k_pool.is_contiguous()
    assert v_pool.is_contiguous()
    if not len(key):
        return
    block_k = triton.next_power_of_2(num_heads * k_size)
    block_v = triton.next_power_of_2(num_heads * v_size)
    _store_kernel[(len(key),)](
        key,
        value,
        k_pool,
        v_pool,
        slots,
        page_table,
        rows,
        positions,
        num_tokens,
        num_pages - 1,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        0 if page_table is None else page_table.stride(0),
        S=page_size,
        G=num_heads,
        DK=k_size,
        DV=v_size,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=min(8, max(1, max(block_k, block_v) // 256)),
    )


@triton.jit(do_not_specialize=["sentinel"])
def _store_kernel(
    key,
    value,
    k_pool,
    v_pool,
    slots,
    page_table,
    rows,
    positions,
    num_tokens,
    sentinel,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    table_stride,
    S: tl.constexpr,
    G: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    # The elements are on their way while the slot is being looked up.
    ek = tl.arange(0, BLOCK_K)
    ev = tl.arange(0, BLOCK_V)
    k = tl.load(key + token * key_stride + (ek // DK) * key_head_stride + ek % DK, mask=ek < G * DK)
    v = tl.load(
        value + token * value_stride + (ev // DV) * value_head_stride + ev % DV, mask=ev < G * DV
    )
    if slots is not None:
        slot = tl.load(slots + token)
    else:
        is_real = True
        if num_tokens is not None:
            is_real = token < tl.load(num_tokens)
        row = tl.load(rows + token).to(tl.int64)
        position = tl.load(positions + token).to(tl.int64)
        place = page_table + row * table_stride + position // S
        page = tl.load(place, mask=is_real, other=0).to(tl.int64)
        slot = tl.where(is_real, page * S + position % S, sentinel.to(tl.int64) * S + token % S)
    tl.store(k_pool + slot * (G * DK) + ek, k.to(k_pool.dtype.element_ty), mask=ek < G * DK)
    tl.store(v_pool + slot * (G * DV) + ev, v.to(v_pool.dtype.element_ty), mask=ev < G * DV)
