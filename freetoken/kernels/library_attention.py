"""Plain extends through the libraries in torch: flash attention, and cuDNN where it is faster.

8192 queries of 32768 keys, 32/4 heads of 128, bf16, on an H200, 2026-12-01, in TFLOP/s: cuDNN 613,
our Triton kernel 449, torch's flash attention 2 347. But cuDNN makes a plan for every pair of
lengths that a thread has not met, which takes some 70 ms. So it is given tiles of one size only,
causal and not; what is left over goes to the Triton kernel.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels import reference_attention

TILE_TOKENS = 4096
"""Queries and keys of one call of cuDNN: enough to fill a GPU, and one merge more costs little."""
MAX_ERROR = 3e-2
"""Relative, of what cuDNN computes: a few roundings of bf16, 0.004 each."""


def plain_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """See attention_ops.extend_attention; fp16 or bf16, on a GPU."""
    if torch.cuda.get_device_capability(query.device)[0] < 9:
        return reference_attention.plain_attention(query, key, value, scaling)
    num_tiled = len(query) // TILE_TOKENS * TILE_TOKENS
    if num_tiled:
        group = query.shape[1] // key.shape[1]
        if not _has_cudnn(query.device, query.dtype, query.shape[2], group):
            num_tiled = 0
    if not num_tiled:
        return _rest(query, key, value, scaling)
    num_rest = len(query) - num_tiled
    end = len(key) - num_rest
    tiled = tiled_attention(query[:num_tiled], key[:end], value[:end], scaling, TILE_TOKENS)
    if not num_rest:
        return tiled
    return torch.cat([tiled, _rest(query[num_tiled:], key, value, scaling)])


def _rest(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    from freetoken.kernels import triton_extend

    return triton_extend.extend_attention(
        query, key, value, scaling=scaling, window=None, softcap=None, sinks=None
    )


def tiled_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float, tile: int) -> Tensor:
    """Lq, a multiple of `tile`, of Lk tokens: tiles of `tile` queries and keys, merged."""
    prefix = len(key) - len(query)
    parts = []
    for first in range(0, len(query), tile):
        q = query[first : first + tile]
        end = prefix + first
        own = slice(end, end + tile)
        out, lse = _cudnn(q, key[own], value[own], True, scaling)
        while end >= tile:
            before = slice(end - tile, end)
            out, lse = merge(out, lse, *_cudnn(q, key[before], value[before], False, scaling))
            end -= tile
        if end:
            out, lse = merge(out, lse, *_flash(q, key[:end], value[:end], scaling))
        parts.append(out)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """([Lq, H, D], [Lq, H] f32: the logarithm of the sum of exponentials)."""
    q, k, v = (_token_major(tensor).transpose(0, 1)[None] for tensor in (query, key, value))
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse = attend(q, k, v, None, True, 0.0, is_causal, False, scale=scaling)[:2]
    return out[0].transpose(0, 1), lse.reshape(q.shape[1:3]).transpose(0, 1)


def _token_major(tensor: Tensor) -> Tensor:
    """[L, H, D] with strides that do not depend on how many tokens the tile was cut from: cuDNN
    makes a plan for every strides, too."""
    return tensor if tensor.stride(0) >= tensor.stride(1) else tensor.contiguous()


def _flash(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """All queries see all keys; returns as _cudnn. It takes any lengths as they come."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse = attend(q, k, v, 0.0, False, False, scale=scaling)[:2]
    return out[0].transpose(0, 1), lse[0].transpose(0, 1)


@lru_cache
def _has_cudnn(device: torch.device, dtype: torch.dtype, size: int, group: int) -> bool:
    """Whether cuDNN attention exists, takes heads and tiles like these, and is right; asked once.

    What it refuses later would be a fault in the middle of a pass, so the tiles are whole ones.
    """
    if torch.cuda.get_device_capability(device)[0] < 9:
        return False  # torch prefers it from there on, too
    generator = torch.Generator(device).manual_seed(0)
    # Views with strides of their own, as a joint product of queries, keys and values leaves them.
    shape = (2 * TILE_TOKENS + 28, 2 * group + 4, size)
    joint = torch.randn(shape, generator=generator, dtype=dtype, device=device)
    query, key, value = joint.split([2 * group, 2, 2], 1)
    query = query[-TILE_TOKENS:]
    try:
        got = tiled_attention(query, key, value, size**-0.5, TILE_TOKENS)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, AttributeError, IndexError):
        return False
    expected = _rest(query, key, value, size**-0.5).float()
    return bool((got.float() - expected).norm() < MAX_ERROR * expected.norm())


def merge(
    first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys → over both. [T, H, D] and lse [T, H] f32 each."""
    num_tokens, num_heads, size = first.shape
    assert first.stride(2) == second.stride(2) == 1
    out = torch.empty((num_tokens, num_heads, size), dtype=first.dtype, device=first.device)
    lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=first.device)
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
    tl.store(out_lse + token * H + head, both, mask=head < H)
    merged = b + (a - b) * share[:, None]
    at = out + (token * H + head[:, None]) * D + column
    tl.store(at, merged.to(out.dtype.element_ty), mask=mask)
