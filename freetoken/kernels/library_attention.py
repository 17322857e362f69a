"""Plain extends through the libraries in torch: flash attention, and cuDNN where it is faster.

scaled_dot_product_attention has cuDNN only for Lq = Lk (585 TFLOP/s on an H200); for the last Lq of
Lk tokens it has flash attention 2 (347). Two calls of cuDNN, one for the prefix and one for the new
tokens, and a merge give 613 (8192 of 32768 + 8192 tokens, 32/4 heads of 128, bf16, 2026-12-01).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels import reference_attention

MIN_CUDNN_SCORES = 1 << 26
"""Below so many scores a head, flash attention is used: cuDNN plans each new pair of lengths."""


def plain_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """See attention_ops.extend_attention; fp16 or bf16, on a GPU."""
    num_queries, num_keys = len(query), len(key)
    if num_queries < num_keys and num_queries * num_keys >= MIN_CUDNN_SCORES:
        group = query.shape[1] // key.shape[1]
        if _has_cudnn(query.device, query.dtype, query.shape[2], group):
            return cudnn_attention(query, key, value, scaling)
    return reference_attention.plain_attention(query, key, value, scaling)


def cudnn_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Lq < Lk: attention over the prefix and over the new tokens by cuDNN, then merged."""
    prefix = len(key) - len(query)
    parts = (
        _cudnn(query, key[:prefix], value[:prefix], False, scaling),
        _cudnn(query, key[prefix:], value[prefix:], True, scaling),
    )
    return merge(*parts[0], *parts[1])


def _cudnn(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """([Lq, H, D], [Lq, H] f32: the logarithm of the sum of exponentials)."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse = attend(q, k, v, None, True, 0.0, is_causal, False, scale=scaling)[:2]
    return out[0].transpose(0, 1), lse.reshape(q.shape[1:3]).transpose(0, 1)


@lru_cache
def _has_cudnn(device: torch.device, dtype: torch.dtype, size: int, group: int) -> bool:
    """Whether cuDNN attention exists, takes heads like these, and is right; asked once."""
    if torch.cuda.get_device_capability(device)[0] < 9:
        return False  # torch prefers it from there on, too
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(length, heads, size, generator=generator).to(device, dtype)
        for length, heads in ((64, 2 * group), (192, 2), (192, 2))
    )
    try:
        got = cudnn_attention(query, key, value, size**-0.5)
    except (RuntimeError, AttributeError, IndexError):
        return False
    expected = reference_attention.extend_attention(query, key, value, scaling=size**-0.5)
    return torch.allclose(got.float(), expected.float(), rtol=2e-2, atol=2e-2)


def merge(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> Tensor:
    """Attention over two sets of keys → over both. first, second: [T, H, D] · lse: [T, H] f32."""
    num_tokens, num_heads, size = first.shape
    assert first.stride(2) == second.stride(2) == 1
    out = torch.empty((num_tokens, num_heads, size), dtype=first.dtype, device=first.device)
    block = triton.next_power_of_2(size)
    heads = min(triton.next_power_of_2(num_heads), max(1, 4096 // block))
    _merge_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        first,
        first_lse,
        second,
        second_lse,
        out,
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
    return out


@triton.jit
def _merge_kernel(
    first,
    first_lse,
    second,
    second_lse,
    out,
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
    share = 1.0 / (1.0 + tl.exp(b_lse - a_lse))
    merged = b + (a - b) * share[:, None]
    at = out + (token * H + head[:, None]) * D + column
    tl.store(at, merged.to(out.dtype.element_ty), mask=mask)
