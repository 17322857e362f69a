"""Linear layers whose weight lies in oneDNN's blocked form: what makes small batches fast on a CPU.

Uses private operators of torch (`mkldnn::_reorder_linear_weight`, `mkldnn::_linear_pointwise`), so
callers ask `can_prepack` first and fall back to F.linear. A packed weight is opaque: its values
cannot be read back, and it is the only copy.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from freetoken.kernels.hugepages import MemoryRange

# Rows that oneDNN is told to expect when it picks the blocked form.
EXPECTED_ROWS = 8


@cache
def can_prepack(dtype: torch.dtype) -> bool:
    """Whether this torch, on this CPU, computes the right thing from packed weights of `dtype`.

    Only bf16 and fp16 gain from packing; fp32 is left to F.linear.
    """
    if dtype not in (torch.bfloat16, torch.float16) or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    try:
        supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{_short_name(dtype)}_supported")
        if not supported():
            return False
        packed = prepack(weight)
        for num_rows in (1, 3, 64):
            x = torch.randn(num_rows, 32, generator=generator).to(dtype)
            expected = F.linear(x.float(), weight.float(), bias.float())
            got = linear_packed(x, packed, bias).float()
            if not torch.allclose(
                got, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max())
            ):
                return False
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


def prepack(weight: torch.Tensor) -> torch.Tensor:
    """[out, in] cpu → the same matrix, opaque, for `linear_packed`."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(
        weight.contiguous(), EXPECTED_ROWS
    )
    return packed


def linear_packed(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x: [*, in] → [*, out]."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return out


def packed_memory(packed: torch.Tensor) -> MemoryRange:
    """Where a packed weight lies."""
    start = int(torch.ops.mkldnn.data_ptr(packed))
    return MemoryRange(start, start + int(torch.ops.mkldnn._nbytes(packed)))


def plain_memory(tensor: torch.Tensor) -> MemoryRange:
    """Where an ordinary contiguous cpu tensor lies."""
    start = tensor.data_ptr()
    return MemoryRange(start, start + tensor.numel() * tensor.itemsize)


def _short_name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
