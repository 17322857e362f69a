"""Whether the library's grouped product is fast and right on a device, found out once by trial."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

# Elsewhere it loops over the groups on the host, and waits for the device to know them.
FAST_CAPABILITIES = ((9, 0), (10, 0))


def has_fast_grouped_mm(x: torch.Tensor, *weights: torch.Tensor) -> bool:
    """True if F.grouped_mm is to be used on these: bf16, strides of 16 bytes, a fast device."""
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return False
    for weight in weights:
        strides = (*weight.shape[1:], weight.stride(0), weight.data_ptr() // weight.itemsize)
        if any(stride % 8 for stride in strides):
            return False
    return _try_device(x.device.index)


@functools.cache
def _try_device(index: int) -> bool:
    if torch.cuda.get_device_capability(index) not in FAST_CAPABILITIES:
        return False
    device = torch.device("cuda", index)
    generator = torch.Generator(device).manual_seed(0)
    # Weights as they lie in expert rows: strided, some experts without pairs, pairs of no expert.
    rows = torch.randn(4, 64 * 96 + 128, generator=generator, device=device).bfloat16()
    weight = rows[:, : 64 * 96].unflatten(1, (96, 64))
    x = torch.randn(50, 64, generator=generator, device=device).bfloat16()
    ends = [7, 7, 40, 48]
    try:
        offs = torch.tensor(ends, dtype=torch.int32, device=device)
        got = F.grouped_mm(x, weight.transpose(1, 2), offs=offs)[: ends[-1]]
    except RuntimeError:
        return False
    parts = [
        x[start:end].float() @ weight[i].float().T
        for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    return torch.allclose(got.float(), torch.cat(parts), rtol=2e-2, atol=2e-2)
