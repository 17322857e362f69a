"""Attention of a flat batch over the pages of its rows: decode rows and small extends.

A program takes the query heads of one kv head for a few consecutive tokens of one row, and one
share of the row's keys. A second kernel joins the shares. Grid and number of shares depend on
shapes alone, so that both can be captured in a CUDA graph; programs without work leave at once.
See attention_ops.paged_attention for the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton_softmax import LOG2E, softmax_step, to_scores

MAX_SPLITS = 64
WIDE_BATCH = 16
"""From so many tokens on, a program takes up to 64 lines of (token, head), else 16, which is the
least that a tensor core takes."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """heads: query heads of a program · tokens: consecutive tokens of a row it takes, a power of 2
    · lines: rows of the query tile, at least heads · tokens · keys: keys a step of its loop."""

    heads: int
    tokens: int
    lines: int
    keys: int

    @staticmethod
    def choose(num_tokens: int, group: int, k_block: int, v_block: int, item: int) -> Tiling:
        """group: query heads of a kv head · k_block, v_block: padded head sizes · item: bytes."""
        key_bytes = (k_block + v_block) * item
        # fp32 products have no tensor cores, and would need too many registers.
        widest = 16 if item == 4 else 64 if key_bytes <= 512 else 32
        heads = min(group, widest)
        lines = widest if num_tokens >= WIDE_BATCH else 16
        tokens = 1
        while 2 * tokens * heads <= lines and 2 * tokens <= num_tokens:
            tokens *= 2
        lines = max(16, triton.next_power_of_2(heads * tokens))
        # 32 KiB of k and v a step, and twice that is in flight: consumer GPUs have 99 KiB.
        keys = 1 << (32768 // key_bytes).bit_length() - 1
        keys = max(16, min(64, keys))
        return Tiling(heads, tokens, lines, keys)


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
    num_splits: int | None = None,
) -> Tensor:
    """num_splits: shares of a row's keys, a power of 2; None: chosen."""
    total, num_heads, k_size = query.shape
    page_size, num_kv_heads, v_size = k_pool.shape[1], k_pool.shape[2], v_pool.shape[3]
    assert query.stride(2) == k_pool.stride(3) == v_pool.stride(3) == page_table.stride(1) == 1
    out = torch.empty((total, num_heads, v_size), dtype=query.dtype, device=query.device)
    if not total:
        return out
    k_block, v_block = (max(16, triton.next_power_of_2(size)) for size in (k_size, v_size))
    group = num_heads // num_kv_heads
    tiling = Tiling.choose(total, group, k_block, v_block, k_pool.element_size())
    head_tiles = num_kv_heads * triton.cdiv(group, tiling.heads)
    if num_splits is None:
        programs = triton.cdiv(total, tiling.tokens) * head_tiles
        longest = page_table.shape[1] * page_size
        if window is not None:
            longest = min(longest, window + tiling.tokens)
        num_splits = _choose_splits(programs, triton.cdiv(longest, tiling.keys), query.device)
    if num_splits == 1:
        shares, lse = out, None
    else:
        shape = (total, num_heads, num_splits)
        shares = torch.empty((*shape, v_size), dtype=torch.float32, device=query.device)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    _share_kernel[(total, head_tiles, num_splits)](
        query,
        k_pool,
        v_pool,
        page_table,
        rows,
        positions,
        num_tokens,
        sinks,
        shares,
        lse,
        total,
        float(scaling),
        0.0 if softcap is None else float(softcap),
        *query.stride()[:2],
        *k_pool.stride()[:3],
        *v_pool.stride()[:3],
        page_table.stride(0),
        H=num_heads,
        GROUP=group,
        DK=k_size,
        DV=v_size,
        S=page_size,
        WINDOW=window or 0,
        HAS_CAP=softcap is not None,
        NUM_SPLITS=num_splits,
        HEADS=tiling.heads,
        TOKENS=tiling.tokens,
        BLOCK_M=tiling.lines,
        BLOCK_N=tiling.keys,
        BLOCK_DK=k_block,
        BLOCK_DV=v_block,
        num_warps=4,
        num_stages=2,
    )
    if lse is not None:
        _join_kernel[(total, num_heads)](
            shares,
            lse,
            num_tokens,
            sinks,
            out,
            H=num_heads,
            DV=v_size,
            NUM_SPLITS=num_splits,
            BLOCK_DV=v_block,
            num_warps=4 if num_splits * v_block <= 8192 else 8,
        )
    return out


def _choose_splits(programs: int, max_steps: int, device: torch.device) -> int:
    """A power of 2 that gives every multiprocessor two programs if the longest row is that long."""
    wanted = max(1, 2 * _num_multiprocessors(device) // programs)
    wanted = min(MAX_SPLITS, wanted, 1 << (max_steps - 1).bit_length())
    return 1 << (wanted.bit_length() - 1)


@lru_cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 8  # Triton's interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit(do_not_specialize=["total"])
def _share_kernel(
    query,
    k_pool,
    v_pool,
    page_table,
    rows,
    positions,
    num_tokens,
    sinks,
    shares,
    lse,
    total,
    scaling,
    softcap,
    q_stride,
    q_head_stride,
    k_page_stride,
    k_slot_stride,
    k_head_stride,
    v_page_stride,
    v_slot_stride,
    v_head_stride,
    table_stride,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    S: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Line m of the query tile is token m // HEADS and head m % HEADS of the program's.

    With one split, `shares` is the output [T, H, DV] itself and `lse` is None. Else shares
    [T, H, NUM_SPLITS, DV] f32 are normalised, and lse [T, H, NUM_SPLITS] is the base-2 logarithm of
    their weight, -inf for none.
    """
    token = tl.program_id(0).to(tl.int64)
    tiles: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // tiles
    split = tl.program_id(2)

    line = tl.arange(0, BLOCK_M)
    peer = line // HEADS
    group_head = (tl.program_id(1) % tiles) * HEADS + line % HEADS
    head = kv_head * GROUP + group_head
    dv = tl.arange(0, BLOCK_DV)
    line_out = ((token + peer) * H + head) * NUM_SPLITS + split
    place_out = shares + line_out[:, None] * DV + dv[None, :]
    is_head = (peer < TOKENS) & (group_head < GROUP)

    end_token = total.to(tl.int64)
    if num_tokens is not None:
        end_token = tl.minimum(end_token, tl.load(num_tokens).to(tl.int64))
    if token >= end_token:
        if NUM_SPLITS == 1:
            zeros = tl.zeros([BLOCK_M, BLOCK_DV], shares.dtype.element_ty)
            tl.store(place_out, zeros, mask=(is_head & (peer == 0))[:, None] & (dv < DV)[None, :])
        return

    # The first token of a row in each aligned group of TOKENS speaks for those that follow it.
    row = tl.load(rows + token).to(tl.int64)
    count = 1
    if TOKENS > 1:
        in_group = token % TOKENS
        before = tl.load(rows + token - 1, mask=in_group > 0, other=-1)
        if before == row:
            return
        ahead = tl.arange(0, TOKENS)
        is_ahead = (ahead < TOKENS - in_group) & (token + ahead < end_token)
        ahead_rows = tl.load(rows + token + ahead, mask=is_ahead, other=-1)
        count = tl.min(tl.where(ahead_rows == row, TOKENS, ahead), axis=0)

    is_line = is_head & (peer < count)
    position = tl.load(positions + token + peer, mask=is_line, other=-1).to(tl.int32)
    high = tl.max(position, axis=0) + 1
    low = 0
    if WINDOW > 0:
        first = tl.min(tl.where(is_line, position, high), axis=0)
        low = tl.maximum(first - WINDOW + 1, 0)
    share = tl.cdiv(tl.cdiv(high - low, NUM_SPLITS), BLOCK_N) * BLOCK_N
    start = low + split * share
    end = tl.minimum(start + share, high)
    if NUM_SPLITS > 1 and start >= end:
        tl.store(lse + line_out, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=is_line)
        return

    dk = tl.arange(0, BLOCK_DK)
    place = query + (token + peer)[:, None] * q_stride + head[:, None] * q_head_stride + dk[None, :]
    q = tl.load(place, mask=is_line[:, None] & (dk < DK)[None, :], other=0.0)
    q = q.to(k_pool.dtype.element_ty)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    pages_of_row = page_table + row * table_stride
    k_pool += kv_head * k_head_stride
    v_pool += kv_head * v_head_stride
    for n in range(start, end, BLOCK_N):
        key = n + tl.arange(0, BLOCK_N)
        is_key = key < end
        page = tl.load(pages_of_row + key // S, mask=is_key, other=0).to(tl.int64)
        k_slot = page * k_page_stride + (key % S) * k_slot_stride
        v_slot = page * v_page_stride + (key % S) * v_slot_stride
        k = tl.load(
            k_pool + k_slot[:, None] + dk[None, :],
            mask=is_key[:, None] & (dk < DK)[None, :],
            other=0.0,
        )
        v = tl.load(
            v_pool + v_slot[:, None] + dv[None, :],
            mask=is_key[:, None] & (dv < DV)[None, :],
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = to_scores(scores, scaling, softcap, HAS_CAP)
        sees = is_key[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            sees &= key[None, :] > position[:, None] - WINDOW
        scores = tl.where(sees, scores, float("-inf"))
        p, shrink, m = softmax_step(scores, m)
        weight = weight * shrink + tl.sum(p, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")

    out_mask = is_line[:, None] & (dv < DV)[None, :]
    if NUM_SPLITS == 1:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=is_line, other=0.0).to(tl.float32) * LOG2E
            # m is finite: a token sees itself.
            weight += tl.exp2(sink - tl.where(is_line, m, 0.0))
        acc = acc / tl.where(weight > 0, weight, 1.0)[:, None]
        tl.store(place_out, acc.to(shares.dtype.element_ty), mask=out_mask)
    else:
        some = weight > 0
        acc = acc / tl.where(some, weight, 1.0)[:, None]
        log = tl.where(some, m + tl.log2(tl.where(some, weight, 1.0)), float("-inf"))
        tl.store(place_out, acc, mask=out_mask)
        tl.store(lse + line_out, log, mask=is_line)


@triton.jit
def _join_kernel(
    shares,
    lse,
    num_tokens,
    sinks,
    out,
    H: tl.constexpr,
    DV: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dv = tl.arange(0, BLOCK_DV)
    line = token * H + head
    place_out = out + line * DV + dv
    if num_tokens is not None and token >= tl.load(num_tokens):
        tl.store(place_out, tl.zeros([BLOCK_DV], out.dtype.element_ty), mask=dv < DV)
        return
    split = tl.arange(0, NUM_SPLITS)
    log = tl.load(lse + line * NUM_SPLITS + split)
    m = tl.max(log, axis=0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        m = tl.maximum(m, sink)
    weight = tl.exp2(log - m)
    total = tl.sum(weight, axis=0)
    if sinks is not None:
        total += tl.exp2(sink - m)
    part = tl.load(
        shares + (line * NUM_SPLITS + split)[:, None] * DV + dv[None, :],
        mask=(log > float("-inf"))[:, None] & (dv < DV)[None, :],
        other=0.0,
    )
    joined = tl.sum(part * weight[:, None], axis=0) / total
    tl.store(place_out, joined.to(out.dtype.element_ty), mask=dv < DV)
