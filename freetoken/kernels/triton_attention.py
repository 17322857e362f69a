"""Attention of a flat batch over the pages of its rows: decode rows and small extends.

A program of share_kernel takes the query heads of one kv head for a few consecutive tokens of one
row, and one share of the row's keys; join_kernel joins the shares. Grid and number of shares depend
on shapes alone, so that both can be captured in a CUDA graph. See attention_ops.paged_attention for
the arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from freetoken.kernels.triton_paged import join_kernel, share_kernel

MAX_SPLITS = 64
FEW_SPLITS = 8
"""Up to so many are joined by a kernel of their own. There are two, and not one for each number of
splits: a kernel takes about a second to compile."""
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
        while 2 * tokens * heads <= lines:
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
    assert num_splits <= MAX_SPLITS
    if num_splits == 1:
        shares, lse = out, None
    else:
        shape = (total, num_heads, num_splits)
        shares = torch.empty((*shape, v_size), dtype=torch.float32, device=query.device)
        lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    share_kernel[(total, head_tiles, num_splits)](
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
        num_splits,
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
        IS_SPLIT=num_splits > 1,
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
        split_block = FEW_SPLITS if num_splits <= FEW_SPLITS else MAX_SPLITS
        join_kernel[(total, num_heads)](
            shares,
            lse,
            num_tokens,
            sinks,
            out,
            num_splits,
            H=num_heads,
            DV=v_size,
            BLOCK_SPLITS=split_block,
            BLOCK_DV=v_block,
            num_warps=4 if split_block * v_block <= 8192 else 8,
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
