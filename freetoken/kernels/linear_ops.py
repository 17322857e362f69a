"""Linear layers of few tokens and outputs: Triton on a GPU, else torch's own."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from freetoken.kernels.dispatch import use_triton

MAX_TOKENS = 16
MAX_OUTPUTS = 1024
"""Of layers such as routers, for which a library uses too few blocks of threads."""


def narrow_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, C] · weightᵀ [N, C] + bias [N] → [T, N], all of one type and any strides.

    Sums in float32. Any T; N is at most MAX_OUTPUTS. Can be captured in a CUDA graph.
    """
    if use_triton(x) and len(x) <= MAX_TOKENS:
        from freetoken.kernels import triton_linear

        return triton_linear.narrow_linear(x, weight, bias)
    return F.linear(x, weight, bias)
