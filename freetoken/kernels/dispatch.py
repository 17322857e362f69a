"""Which form of a kernel runs: the one question that every `*_ops.py` asks.

The Triton modules are imported only where a tensor is on a GPU, so that the CPU needs no triton.
"""

from __future__ import annotations

import torch


def use_triton(tensor: torch.Tensor) -> bool:
    """True if kernels on this tensor are the Triton ones; else the plain-torch references run."""
    return tensor.is_cuda
