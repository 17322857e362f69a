"""Attention in plain torch: the specification of the attention kernels. See attention_ops.py.

Scores and softmax are fp32, whatever the type of the operands.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

MAX_SCORES = 1 << 24
"""Scores (fp32) of extend_attention that exist at a time."""


def store_kv(key: Tensor, value: Tensor, k_pool: Tensor, v_pool: Tensor, slots: Tensor) -> None:
    k_pool.flatten(0, 1).index_copy_(0, slots, key.to(k_pool.dtype))
    v_pool.flatten(0, 1).index_copy_(0, slots, value.to(v_pool.dtype))


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
    slots = find_slots(page_table, rows, positions, num_tokens, *k_pool.shape[:2])
    store_kv(key, value, k_pool, v_pool, slots)


def find_slots(
    page_table: Tensor,
    rows: Tensor,
    positions: Tensor,
    num_tokens: Tensor | None,
    num_pages: int,
    page_size: int,
) -> Tensor:
    """[T] int64: the slot of each token; padding gets one of the last of the `num_pages` pages."""
    tokens = torch.arange(len(rows), device=rows.device)
    pages, places = (num_pages - 1) * torch.ones_like(rows), tokens % page_size
    real = tokens if num_tokens is None else tokens[tokens < num_tokens]
    count = len(real)
    pages[:count] = page_table[rows[:count], positions[:count] // page_size].long()
    places[:count] = positions[:count] % page_size
    return pages * page_size + places


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
    page_size = k_pool.shape[1]
    out = query.new_zeros(*query.shape[:2], v_pool.shape[-1])
    count = len(query) if num_tokens is None else min(len(query), int(num_tokens))
    places = list(zip(rows[:count].tolist(), positions[:count].tolist(), strict=True))
    for token, (row, position) in enumerate(places):
        first = 0 if window is None else max(0, position - window + 1)
        seen = torch.arange(first, position + 1, device=query.device)
        slots = page_table[row, seen // page_size].long() * page_size + seen % page_size
        key, value = k_pool.flatten(0, 1)[slots], v_pool.flatten(0, 1)[slots]
        one = slice(token, token + 1)
        out[one] = _attend(query[one], key, value, None, scaling, softcap, sinks)
    return out


def plain_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """extend_attention without window, softcap and sinks, by scaled_dot_product_attention."""
    num_queries, num_keys = len(query), len(key)
    bias: Tensor | None = None
    if num_queries < num_keys:
        # On a GPU this calls the flash kernel, elsewhere it becomes a [Lq, Lk] mask.
        bias = causal_lower_right(num_queries, num_keys)
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        attn_mask=bias,
        is_causal=bias is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[0].transpose(0, 1)


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
    (num_queries, num_heads, _), num_keys = query.shape, len(key)
    block = max(1, MAX_SCORES // (num_heads * num_keys))
    keys = torch.arange(num_keys, device=query.device)
    parts = []
    for first in range(0, num_queries, block):
        queries = query[first : first + block]
        at = num_keys - num_queries + first
        places = torch.arange(at, at + len(queries), device=query.device)[:, None]
        sees = keys <= places
        if window is not None:
            sees &= keys > places - window
        parts.append(_attend(queries, key, value, sees, scaling, softcap, sinks))
    return torch.cat(parts)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sees: Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """sees: [Lq, Lk] bool, which keys a query sees; None: all of them."""
    num_queries, num_heads, size = query.shape
    num_kv_heads = key.shape[1]
    q = query.float().view(num_queries, num_kv_heads, -1, size)
    scores = torch.einsum("qgjd,kgd->gjqk", q, key.float()).mul_(scaling)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    if sees is not None:
        scores.masked_fill_(~sees, float("-inf"))
    if sinks is not None:
        # A sink is one more score, whose share of the softmax is dropped.
        more = sinks.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, more], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out = torch.einsum("gjqk,kgd->qgjd", weights, value.float())
    return out.reshape(num_queries, num_heads, -1).to(query.dtype)
