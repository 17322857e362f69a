"""Extends without a window or softcap through the libraries in torch: cuDNN where it is faster.

8192 queries of 32768 keys, 32/4 heads of 128, bf16, on an H200, 2026-12-01, in TFLOP/s: cuDNN 613,
our Triton kernel 449, torch's flash attention 2 347. But cuDNN makes a plan for every pair of
lengths that a thread has not met, which takes some 70 ms. So it is given tiles of two sizes only,
causal and not, cut at multiples of their size counted from a row's first token. Queries that nearly
fill a tile are padded to one; fewer go to the Triton kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels import reference_attention
from freetoken.kernels.attention_ops import TILE_SIZES

MIN_FILL = 0.75
"""Of a tile, by queries, from where on cuDNN with padding is faster than Triton without."""
MAX_ERROR = 3e-2
"""Relative, of what cuDNN computes: a few roundings of bf16, 0.004 each."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, sinks: Tensor | None
) -> Tensor:
    """See attention_ops.extend_attention; fp16 or bf16, on a GPU."""
    if torch.cuda.get_device_capability(query.device)[0] < 9:
        if sinks is None:
            return reference_attention.plain_attention(query, key, value, scaling)
        return _triton(query, key, value, scaling, sinks)
    pieces = cut_queries(len(query), len(key), TILE_SIZES)
    if any(piece.tile for piece in pieces):
        group = query.shape[1] // key.shape[1]
        if not _has_cudnn(query.device, query.dtype, query.shape[2], group):
            pieces = [Piece(0, len(query), None)]
    parts = []
    for piece in pieces:
        end = len(key) - len(query) + piece.hi
        tensors = query[piece.lo : piece.hi], key[:end], value[:end]
        if piece.tile is None:
            parts.append(_triton(*tensors, scaling, sinks))
        else:
            parts.append(attend_tile(*tensors, scaling, sinks, piece.tile))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, slots=True)
class Piece:
    """Queries `[lo, hi)`, which nearly fill a tile of `tile` tokens; None: they do not."""

    lo: int
    hi: int
    tile: int | None


def cut_queries(num_queries: int, num_keys: int, sizes: Sequence[int]) -> list[Piece]:
    """The last `num_queries` of `num_keys` tokens, cut so that as many as can be are in tiles.

    sizes: of tiles, the largest first, each a multiple of the next.
    """
    first = num_keys - num_queries
    pieces: list[Piece] = []
    lo = 0
    while lo < num_queries:
        tile, hi = _find_tile(first + lo, num_keys, sizes)
        if tile is None and pieces and pieces[-1].tile is None:
            lo = pieces.pop().lo
        pieces.append(Piece(lo, hi - first, tile))
        lo = hi - first
    return pieces


def _find_tile(position: int, end: int, sizes: Sequence[int]) -> tuple[int | None, int]:
    """The largest tile that tokens from `position` on nearly fill, and where that ends."""
    for size in sizes:
        hi = min(end, (position // size + 1) * size)
        if hi - position >= MIN_FILL * size:
            return size, hi
    return None, hi


def _triton(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, sinks: Tensor | None
) -> Tensor:
    from freetoken.kernels import triton_extend

    return triton_extend.extend_attention(
        query, key, value, scaling=scaling, window=None, softcap=None, sinks=sinks
    )


def attend_tile(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, sinks: Tensor | None, tile: int
) -> Tensor:
    """The last Lq of Lk tokens, which lie between two multiples of `tile`."""
    num_queries, first = len(query), len(key) - len(query)
    lead, begin = first % tile, first - first % tile
    assert lead + num_queries <= tile
    # No token sees a padding key, as those come last.
    own_key, own_value = _pad(key[begin:], 0, tile), _pad(value[begin:], 0, tile)
    query = _pad(query, lead, tile)
    out, lse = _cudnn(query, own_key, own_value, True, scaling)
    for end in range(begin, 0, -tile):
        before = slice(end - tile, end)
        out, lse = merge(out, lse, *_cudnn(query, key[before], value[before], False, scaling))
    if sinks is not None:
        nothing = out.new_zeros(out.shape[2]).expand_as(out)
        out, _ = merge(out, lse, nothing, sinks.float().expand_as(lse))
    return out[lead : lead + num_queries]


def _pad(tensor: Tensor, lead: int, length: int) -> Tensor:
    """[L, H, D] → [length, H, D] contiguous: `lead` zeros, the tensor, zeros."""
    if len(tensor) == length:
        return tensor.contiguous()
    return F.pad(tensor, (0, 0, 0, 0, lead, length - lead - len(tensor)))


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """([Lq, H, D], [Lq, H] f32: the logarithm of the sum of exponentials)."""
    # Contiguous, as cuDNN makes a plan for other strides, too.
    q, k, v = (tensor.contiguous().transpose(0, 1)[None] for tensor in (query, key, value))
    run = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse = run(q, k, v, None, True, 0.0, is_causal, False, scale=scaling)[:2]
    return out[0].transpose(0, 1), lse.reshape(q.shape[1:3]).transpose(0, 1)


@lru_cache
def _has_cudnn(device: torch.device, dtype: torch.dtype, size: int, group: int) -> bool:
    """Whether cuDNN attention exists, takes heads and tiles like these, and is right; asked once.

    What it refuses later would be a fault in the middle of a pass, so the tiles are whole ones; of
    the smaller size, as this takes memory beside a chunk's.
    """
    generator = torch.Generator(device).manual_seed(0)
    tile = TILE_SIZES[-1]
    shape = (2 * tile - tile // 8, 2 * group + 4, size)
    joint = torch.randn(shape, generator=generator, dtype=dtype, device=device)
    query, key, value = joint.split([2 * group, 2, 2], 1)
    query = query[tile:]
    how = (size**-0.5, None)
    try:
        got = attend_tile(query, key, value, *how, tile)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError, IndexError):
        return False
    expected = _triton(query, key, value, *how).float()
    return bool((got.float() - expected).norm() < MAX_ERROR * expected.norm())


def merge(
    first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys → over both. [T, H, D] and lse [T, H] f32 each."""
    num_tokens, num_heads, size = first.shape
    assert first.stride(2) == second.stride(2) == 1
    out = torch.empty((num_tokens, num_heads, size), dtype=first.dtype, device=first.device)
    # Laid out as cuDNN's: Triton compiles a kernel again for a last stride that is not 1.
    lse = torch.empty((num_heads, num_tokens), dtype=torch.float32, device=first.device).T
    block = triton.next_power_of_2(size)
    heads = min(triton.next_power_of_2(num_heads), max(1, 4096 // block))
    _merge_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        first,
        first_lse,
        second,
        second_lse,
        out,
        lse,
        *first.stride()[:2],
        *first_lse.stride(),
        *second.stride()[:2],
        *second_lse.stride(),
        H=num_heads,
        D=size,
        BLOCK_H=heads,
        BLOCK_D=block,
        num_warps=4,
    )
    return out, lse


@triton.jit
def _merge_kernel(
    first,
    first_lse,
    second,
    second_lse,
    out,
    out_lse,
    first_stride,
    first_head_stride,
    first_lse_stride,
    first_lse_head_stride,
    second_stride,
    second_head_stride,
    second_lse_stride,
    second_lse_head_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < H)[:, None] & (column < D)
    at = first + token * first_stride + head[:, None] * first_head_stride + column
    a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at = second + token * second_stride + head[:, None] * second_head_stride + column
    b = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at = first_lse + token * first_lse_stride + head * first_lse_head_stride
    a_lse = tl.load(at, mask=head < H, other=0.0)
    at = second_lse + token * second_lse_stride + head * second_lse_head_stride
    b_lse = tl.load(at, mask=head < H, other=0.0)
    # One of the two may be far smaller, never both -inf: a token sees itself.
    share = 1.0 / (1.0 + tl.exp(b_lse - a_lse))
    high = tl.maximum(a_lse, b_lse)
    both = high + tl.log(tl.exp(a_lse - high) + tl.exp(b_lse - high))
    tl.store(out_lse + token + head * tl.num_programs(0), both, mask=head < H)
    merged = b + (a - b) * share[:, None]
    at = out + (token * H + head[:, None]) * D + column
    tl.store(at, merged.to(out.dtype.element_ty), mask=mask)
