"""Linear layers of few tokens: Triton on a GPU where a library is slower, else torch's own."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from freetoken.kernels.dispatch import use_triton

MAX_TOKENS = 16
NARROW = 1024
"""Outputs of layers such as routers, for which a library starts too few programs."""


def few_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, C] · weightᵀ [N, C] + bias [N] → [T, N], all of one type; sums in float32.

    Can be captured in a CUDA graph.
    """
    if use_triton(x) and suits_few(len(x), len(weight)):
        from freetoken.kernels import triton_linear

        return triton_linear.few_linear(x, weight, bias)
    return F.linear(x, weight, bias)


def suits_few(num_tokens: int, num_outputs: int) -> bool:
    """Whether our kernel is the faster one."""
    return num_tokens == 1 or (num_tokens <= MAX_TOKENS and num_outputs <= NARROW)
