"""Attention for callers: the reference on the CPU, Triton and SDPA on a GPU.

Shapes: T tokens, H query heads, G kv heads, Dk and Dv head sizes of keys and values, P pages of
S slots, R rows. Pools are `[P + 1, S, G, D]`; their last page is the sentinel that padding writes
to. Slot `page * S + i` is place i of a page. Everything here can be captured in a CUDA graph,
except `extend_attention`, whose lengths are host numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from freetoken.kernels import reference_attention
from freetoken.kernels.dispatch import use_triton

TILE_SIZES = (8192, 4096)
"""extend_attention is fastest for queries from one multiple of these to another, in tokens counted
from their row's first one on. The largest first, each a multiple of the next."""


def store_kv(key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    """Write key [T, G, Dk] and value [T, G, Dv] to `slots` [T] int64 of the pools.

    key and value may be views with any strides but a contiguous last dimension.
    """
    if use_triton(key):
        from freetoken.kernels import triton_store

        triton_store.store_kv(key, value, k_pool, v_pool, slots)
    else:
        reference_attention.store_kv(key, value, k_pool, v_pool, slots)


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
    """As store_kv, the slot of a token taken from its row's pages and its position.

    page_table: [R, max_pages] int32 · rows, positions: [T] int64 · num_tokens: [1] int32 or None;
    tokens beyond it are padding and write to the sentinel page.
    """
    if use_triton(key):
        from freetoken.kernels import triton_store

        store = triton_store.store_kv_paged
    else:
        store = reference_attention.store_kv_paged
    store(key, value, k_pool, v_pool, page_table, rows, positions, num_tokens)


def paged_attention(
    query: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    page_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    num_tokens: Tensor | None,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Each token of query [T, H, Dk] attends positions (p - window, p] of its row → [T, H, Dv].

    The k/v of all these positions, its own included, must be in the pools. page_table:
    [R, max_pages] int32 · rows, positions: [T] int64 · num_tokens: [1] int32 or None; tokens beyond
    it are padding: their rows and positions are not looked at, their output is zero.
    sinks: [H], scores that take part in the softmax and have no value.
    """
    attend: Callable[..., Tensor] = reference_attention.paged_attention
    if use_triton(query):
        from freetoken.kernels import triton_attention

        attend = triton_attention.paged_attention
    return attend(
        query,
        k_pool,
        v_pool,
        page_table,
        rows,
        positions,
        num_tokens,
        scaling=scaling,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )


def extend_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The last Lq of Lk tokens of one row attend all before them, the window permitting.

    query: [Lq, H, Dk], key: [Lk, G, Dk], value: [Lk, G, Dv], Lq ≤ Lk → [Lq, H, Dv]. Any strides but
    a contiguous last dimension. A window of Lk or more is none.
    """
    if window is not None and window >= len(key):
        window = None
    is_plain = window is None and softcap is None
    attend: Callable[..., Tensor] = reference_attention.extend_attention
    if not use_triton(query):
        if is_plain and sinks is None:
            return reference_attention.plain_attention(query, key, value, scaling)
    elif is_plain and _is_flash(query, value):
        from freetoken.kernels import library_attention

        return library_attention.attend(query, key, value, scaling, sinks)
    else:
        from freetoken.kernels import triton_extend

        attend = triton_extend.extend_attention
    return attend(query, key, value, scaling=scaling, window=window, softcap=softcap, sinks=sinks)


def _is_flash(query: Tensor, value: Tensor) -> bool:
    """True if scaled_dot_product_attention has a flash kernel: otherwise it builds [Lq, Lk]."""
    size = query.shape[-1]
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return is_half and size == value.shape[-1] and size <= 256 and size % 8 == 0
