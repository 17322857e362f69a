"""Which form of a kernel runs: the one question that every `*_ops.py` asks.

The Triton modules are imported only where a tensor is on a GPU, so that the CPU needs no triton.
"""

from __future__ import annotations

import functools
import os

import torch

FUSION_VARIABLE = "TRITON_DEFAULT_FP_FUSION"


def use_triton(tensor: torch.Tensor) -> bool:
    """True if kernels on this tensor are the Triton ones; else the plain-torch references run."""
    if not tensor.is_cuda:
        return False
    fuse_products()
    return True


@functools.cache
def fuse_products() -> None:
    """Let Triton join a product and a sum into one rounding, as all versions do up to 3.9.

    3.9 warns at the first kernel where nobody has said so, and 3.10 would compute something else.
    """
    os.environ.setdefault(FUSION_VARIABLE, "1")
