"""Flash attention for extends with a window, a softcap or unequal head sizes, and short ones.

One program takes a block of queries of one head and goes over the keys that the causal rule and the
window leave; only the blocks at the borders are masked. attention_ops.extend_attention has the
arguments, and asks libraries where those are faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.triton_softmax import LOG2E, softmax_step, to_scores


@dataclass(frozen=True, slots=True)
class Tiling:
    queries: int
    keys: int
    num_warps: int
    num_stages: int

    @staticmethod
    def choose(head_bytes: int, item: int, is_server: bool) -> Tiling:
        """head_bytes: the padded key and value of one token and head · item: bytes an element ·
        is_server: the GPU has 160 KiB or more of shared memory a block, else 99."""
        if item == 4:
            return Tiling(32, 32 if head_bytes <= 1024 else 16, 4, 1)
        if head_bytes <= 256:
            return Tiling(128, 64, 4, 3)
        if head_bytes <= 512:
            return Tiling(128, 64, 8, 3) if is_server else Tiling(64, 64, 4, 2)
        if head_bytes <= 1024:
            return Tiling(128, 32, 8, 2) if is_server else Tiling(64, 32, 4, 1)
        return Tiling(32, 16, 4, 1)


def extend_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """tiling: None for the one that suits the GPU."""
    num_queries, num_heads, k_size = query.shape
    num_keys, num_kv_heads, v_size = value.shape
    assert query.stride(2) == key.stride(2) == value.stride(2) == 1
    assert 0 < num_queries <= num_keys
    out = torch.empty((num_queries, num_heads, v_size), dtype=query.dtype, device=query.device)
    k_block, v_block = (max(16, triton.next_power_of_2(size)) for size in (k_size, v_size))
    item = key.element_size()
    if tiling is None:
        tiling = Tiling.choose((k_block + v_block) * item, item, _is_server(query.device))
    _extend_kernel[(triton.cdiv(num_queries, tiling.queries), num_heads)](
        query,
        key,
        value,
        sinks,
        out,
        num_queries,
        num_keys,
        float(scaling),
        0.0 if softcap is None else float(softcap),
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        H=num_heads,
        GROUP=num_heads // num_kv_heads,
        DK=k_size,
        DV=v_size,
        WINDOW=window or 0,
        HAS_CAP=softcap is not None,
        BLOCK_M=tiling.queries,
        BLOCK_N=tiling.keys,
        BLOCK_DK=k_block,
        BLOCK_DV=v_block,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    return out


@lru_cache
def _is_server(device: torch.device) -> bool:
    """sm_80, sm_90 and sm_100 and 103 have large shared memories; 86, 89 and 120 do not."""
    if device.type != "cuda":
        return False
    major, minor = torch.cuda.get_device_capability(device)
    return (major, minor) == (8, 0) or major in (9, 10)


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def _extend_kernel(
    query,
    key,
    value,
    sinks,
    out,
    num_queries,
    num_keys,
    scaling,
    softcap,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    # The last queries have the most keys: they start first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)  # head-major queries of a long chunk pass 2³¹ elements
    index = first + tl.arange(0, BLOCK_M)
    is_query = index < num_queries
    dk = tl.arange(0, BLOCK_DK)
    dv = tl.arange(0, BLOCK_DV)
    q = tl.load(
        query + index.to(tl.int64)[:, None] * q_stride + head * q_head_stride + dk[None, :],
        mask=is_query[:, None] & (dk < DK)[None, :],
        other=0.0,
    )
    keys = key + (head // GROUP) * k_head_stride
    values = value + (head // GROUP) * v_head_stride

    # Query i stands at key num_keys - num_queries + i.
    position = num_keys - num_queries + index
    lowest = num_keys - num_queries + first
    end = tl.minimum(lowest + BLOCK_M, num_keys)
    full_end = (lowest + 1) // BLOCK_N * BLOCK_N
    start = 0
    full_start = 0
    if WINDOW > 0:
        start = tl.maximum(lowest - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        full_start = tl.cdiv(tl.maximum(end - WINDOW, 0), BLOCK_N) * BLOCK_N
    full_end = tl.maximum(full_end, full_start)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for part in tl.static_range(3):
        if part == 0:
            lo, hi = start, tl.minimum(full_start, end)
        elif part == 1:
            lo, hi = full_start, full_end
        else:
            lo, hi = full_end, end
        if part != 0 or WINDOW > 0:
            for n in range(lo, hi, BLOCK_N):
                n = tl.multiple_of(n, BLOCK_N)
                at = n + tl.arange(0, BLOCK_N)
                is_key = (at < end) | (part == 1)  # which needs no check
                offset = at.to(tl.int64)[:, None]
                k = tl.load(
                    keys + offset * k_stride + dk[None, :],
                    mask=is_key[:, None] & (dk < DK)[None, :],
                    other=0.0,
                )
                v = tl.load(
                    values + offset * v_stride + dv[None, :],
                    mask=is_key[:, None] & (dv < DV)[None, :],
                    other=0.0,
                )
                scores = tl.dot(q, tl.trans(k), input_precision="ieee")
                scores = to_scores(scores, scaling, softcap, HAS_CAP)
                if part != 1:
                    sees = is_key[None, :] & (at[None, :] <= position[:, None])
                    if WINDOW > 0:
                        sees &= at[None, :] > position[:, None] - WINDOW
                    scores = tl.where(sees, scores, float("-inf"))
                p, shrink, m = softmax_step(scores, m)
                weight = weight * shrink + tl.sum(p, axis=1)
                acc = acc * shrink[:, None]
                acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")

    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        weight += tl.exp2(sink - tl.where(is_query, m, 0.0))
    acc = acc / tl.where(weight > 0, weight, 1.0)[:, None]
    tl.store(
        out + (index.to(tl.int64) * H + head)[:, None] * DV + dv[None, :],
        acc.to(out.dtype.element_ty),
        mask=is_query[:, None] & (dv < DV)[None, :],
    )
