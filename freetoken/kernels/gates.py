"""What stands between the two products of an expert, as data that a kernel can compute.

`recognise_gate` finds out by numeric trial whether a module's gate (or its activation, for experts
without a gate) is one of the forms below. A form that it does not know stays a Python function,
which runs between the kernels instead of inside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from freetoken.kernels.ops import Gate

# Activations that kernels know; `swish` is x · sigmoid(alpha · x): silu and quick_gelu.
ACTIVATIONS = ("swish", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "identity")
# Beyond any limit a gate clamps to, and still exact beside it in fp64.
_FAR = 1e6
# The trial's tolerance: some gates compute in fp32 whatever they are given.
_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class GateKind:
    """act(min(gate, limit)) · (clamp(up, −limit, limit) + up_shift), or act(up) without a gate.

    Columns of the up product are [gate | up], or gate, up, gate, up, … when `interleaved`.
    Called with the up product [S, 2F] (ungated: [S, F]) it computes [S, F] in plain torch.
    """

    activation: str
    is_gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float | None = None
    up_shift: float = 0.0

    def __post_init__(self) -> None:
        assert self.activation in ACTIVATIONS, self.activation

    def __call__(self, product: torch.Tensor) -> torch.Tensor:
        x = product if product.dtype == torch.float64 else product.float()
        if not self.is_gated:
            return self._activate(x).to(product.dtype)
        gate, up = (x[..., ::2], x[..., 1::2]) if self.interleaved else x.chunk(2, dim=-1)
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
            up = up.clamp(-self.limit, self.limit)
        return (self._activate(gate) * (up + self.up_shift)).to(product.dtype)

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        match self.activation:
            case "swish":
                return x * torch.sigmoid(self.alpha * x)
            case "gelu":
                return F.gelu(x)
            case "gelu_tanh":
                return F.gelu(x, approximate="tanh")
            case "relu":
                return F.relu(x)
            case "relu2":
                return F.relu(x).square()
            case "sigmoid":
                return torch.sigmoid(x)
            case "tanh":
                return torch.tanh(x)
            case _:
                return x


@torch.no_grad()
def recognise_gate(gate: Gate, has_gate: bool, width: int, dtype: torch.dtype) -> GateKind | None:
    """The kind that computes what `gate` does, or None.

    gate: maps the up product [S, width] to [S, width / 2], or without a gate to [S, width] ·
    dtype: the model's, in which the kind must agree as well, up to rounding.
    """
    try:
        for kind in _candidates(gate, has_gate, width):
            if _agrees(gate, kind, width, torch.float64) and _agrees(gate, kind, width, dtype):
                return kind
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None  # needs another type or device, or parameters that are not loaded
    return None


def _candidates(gate: Gate, has_gate: bool, width: int) -> list[GateKind]:
    """Kinds whose constants are read off the function's values."""
    if not has_gate:
        alpha = _read_alpha(float(_value(gate, torch.full((width,), 0.5))))
        return [_kind(name, alpha, False, False, None, 0.0) for name in ACTIVATIONS]
    kinds = []
    for interleaved in (False, True):
        at_zero, at_half, far = (
            _probe(gate, 0.5, up, width, interleaved) for up in (0.0, 0.5, _FAR)
        )
        slope = 2 * (at_half - at_zero)  # act(0.5), where up is not clamped
        if slope == 0:
            continue
        shift = round(at_zero / slope, 4)
        top = far / slope - shift
        limit = None if top > _FAR / 2 else round(top, 4)
        alpha = _read_alpha(slope)
        kinds += [_kind(name, alpha, True, interleaved, limit, shift) for name in ACTIVATIONS]
    return kinds


def _kind(
    name: str, alpha: float, gated: bool, interleaved: bool, limit: float | None, shift: float
) -> GateKind:
    return GateKind(name, gated, interleaved, alpha if name == "swish" else 1.0, limit, shift)


def _read_alpha(value: float) -> float:
    """alpha, if `value` is swish(0.5); 1 if it cannot be."""
    ratio = 2 * value
    if not 0 < ratio < 1:
        return 1.0
    return round(2 * math.log(ratio / (1 - ratio)), 4)


def _probe(gate: Gate, g: float, u: float, width: int, interleaved: bool) -> float:
    """The first output where all gates are `g` and all ups are `u`."""
    row = torch.full((width,), g)
    if interleaved:
        row[1::2] = u
    else:
        row[width // 2 :] = u
    return float(_value(gate, row))


def _value(gate: Gate, row: torch.Tensor) -> torch.Tensor:
    return gate(row.double().unsqueeze(0))[0, 0]


def _agrees(gate: Gate, kind: GateKind, width: int, dtype: torch.dtype) -> bool:
    """Whether both give the same on random inputs, small, around one, and far outside."""
    generator = torch.Generator().manual_seed(0)
    trial = torch.randn(24, width, generator=generator, dtype=torch.float64)
    trial[:8] *= 0.05
    trial[16:] *= 2 * max(6.0, kind.limit or 0.0)
    trial = trial.to(dtype)
    expected = gate(trial)
    if expected.dtype != dtype or expected.shape[-1] != (width // 2 if kind.is_gated else width):
        return False
    tolerance = max(_TOLERANCE, 8 * torch.finfo(dtype).eps)
    got = kind(trial).double()
    return torch.allclose(got, expected.double(), rtol=tolerance, atol=tolerance)
