"""Faster forms of a model's ordinary layers on the CPU, put in place of the modules.

No model code is touched: a module is replaced only by one that computes the same function of its
input. Linear layers of bf16 and fp16 get packed weights. RMS norms, which every family writes out
in six operators, get torch's fused one if a trial shows that it computes the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from freetoken.kernels.prepacked import can_prepack, linear_packed, prepack


class PackedLinear(nn.Module):
    """nn.Linear with a packed weight; the plain one is given up."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._packed = prepack(linear.weight.detach())
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:
            return x.new_empty(*x.shape[:-1], self.out_features)
        return linear_packed(x, self._packed, self._bias)


class FusedRMSNorm(nn.Module):
    """x: [*, C] → x / sqrt(mean(x²) + eps) · weight, computed in fp32, in x's dtype."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self._weight = weight.detach()
        self._shape = tuple(weight.shape)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._shape, self._weight, self._eps)


def speed_up_for_cpu(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace layers of `model`, which must be loaded, on the CPU, and in eval mode.

    Only those whose weights have `dtype`, the type of the hidden states: some families keep a few
    in fp32, and how types mix is their business.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = getattr(child, "weight", None)
            if not isinstance(weight, torch.Tensor) or weight.dtype != dtype:
                continue
            if type(child) is nn.Linear and can_prepack(dtype):
                setattr(parent, name, PackedLinear(child))
            elif (fused := _fused_rms_norm(child)) is not None:
                setattr(parent, name, fused)


@torch.no_grad()
def _fused_rms_norm(module: nn.Module) -> FusedRMSNorm | None:
    """A fused norm if it computes what `module` does, found out by a trial; else None.

    Inputs far below epsilon, around one, and large show a different place for epsilon or the
    weight. Half precision may differ by one rounding, of the product with the weight.
    """
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", None)
    if not isinstance(weight, torch.Tensor) or not isinstance(eps, float) or weight.dim() != 1:
        return None
    if list(module.children()) or weight.device.type != "cpu":
        return None
    generator = torch.Generator().manual_seed(0)
    trial = torch.randn(3, len(weight), generator=generator)
    trial = (trial * torch.tensor([[1e-7], [1.0], [1e3]])).to(weight.dtype)
    try:
        expected = module(trial)
    except (RuntimeError, TypeError):
        return None
    fused = FusedRMSNorm(weight, eps)
    got = fused(trial)
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return None
    tolerance = 2 * torch.finfo(weight.dtype).eps
    return fused if torch.allclose(got, expected, rtol=tolerance, atol=0.0) else None
