"""x · weightᵀ for few tokens: a program reads the weights of a few outputs once, for all tokens.

A library gives a router of 128 experts two programs, which take 5 µs (H200, torch 2.11, 4 and 8
tokens of 2048, bf16, 2026-12-01), and sums wide products of one token in two steps. See
linear_ops.few_linear.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freetoken.kernels.linear_ops import NARROW

BLOCK_C = 1024
WIDE_OUTPUTS = 4
"""Of one program where there are more than enough of them."""
NUM_WARPS = 4


def few_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num_tokens, size = x.shape
    num_outputs = len(weight)
    assert weight.shape == (num_outputs, size)
    assert x.stride(1) == weight.stride(1) == 1
    assert bias is None or bias.stride(0) == 1
    out = torch.empty((num_tokens, num_outputs), dtype=x.dtype, device=x.device)
    if num_tokens:
        block = 1 if num_outputs <= NARROW else WIDE_OUTPUTS
        _linear_kernel[(triton.cdiv(num_outputs, block),)](
            x,
            weight,
            bias,
            out,
            num_tokens,
            x.stride(0),
            weight.stride(0),
            N=num_outputs,
            C=size,
            BLOCK_T=triton.next_power_of_2(num_tokens),
            BLOCK_N=block,
            BLOCK_C=min(BLOCK_C, triton.next_power_of_2(size)),
            num_warps=NUM_WARPS,
        )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_kernel(
    x,
    weight,
    bias,
    out,
    num_tokens,
    x_stride,
    weight_stride,
    N: tl.constexpr,
    C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, BLOCK_T)
    is_output, is_token = output < N, token < num_tokens
    weights = weight + output.to(tl.int64)[:, None] * weight_stride
    acc = tl.zeros([BLOCK_T, BLOCK_N, BLOCK_C], tl.float32)
    for first in tl.static_range(0, C, BLOCK_C):
        at = first + tl.arange(0, BLOCK_C)[None, :]
        w = tl.load(weights + at, mask=is_output[:, None] & (at < C), other=0.0)
        rows = x + token[:, None] * x_stride + at
        part = tl.load(rows, mask=is_token[:, None] & (at < C), other=0.0)
        acc += part.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :]
    total = tl.sum(acc, axis=2)
    if bias is not None:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + token[:, None] * N + output[None, :],
        total.to(out.dtype.element_ty),
        mask=is_token[:, None] & is_output[None, :],
    )
