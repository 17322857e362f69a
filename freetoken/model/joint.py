"""Linear layers that read the same input, as rows of one weight: for GPUs.

A model's code calls q_proj, k_proj and v_proj one after the other. Compiled, each of them computes
the product of all, which graph_passes.py finds to be the same: one product is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from freetoken.model.layers import SIBLINGS


class JointLinear(nn.Module):
    """Rows `[lo, hi)` of a weight that several layers share; computes what nn.Linear did."""

    def __init__(
        self, joint_weight: nn.Parameter, joint_bias: nn.Parameter | None, lo: int, hi: int
    ) -> None:
        super().__init__()
        self.in_features = joint_weight.shape[1]
        self.out_features = hi - lo
        self.joint_weight = joint_weight
        self.joint_bias = joint_bias
        self._lo = lo
        self._hi = hi

    @property
    def weight(self) -> torch.Tensor:
        """[out, in], a view."""
        return self.joint_weight[self._lo : self._hi]

    @property
    def bias(self) -> torch.Tensor | None:
        """[out], a view."""
        return None if self.joint_bias is None else self.joint_bias[self._lo : self._hi]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return F.linear(x, self.joint_weight, self.joint_bias)[..., self._lo : self._hi]
        return F.linear(x, self.weight, self.bias)


@torch.no_grad()
def join_linears(model: nn.Module) -> None:
    """Join siblings wherever a module has them; their own weights are given up."""
    for parent in list(model.modules()):
        children = dict(parent.named_children())
        for names in SIBLINGS:
            found = [children.get(name) for name in names]
            linears = [child for child in found if isinstance(child, nn.Linear)]
            if len(linears) == len(names) and _can_join(linears):
                _join(parent, names, linears)


def _can_join(linears: Sequence[nn.Linear]) -> bool:
    kinds = {
        (type(linear), linear.in_features, linear.weight.dtype, linear.bias is None)
        for linear in linears
    }
    return len(kinds) == 1 and type(linears[0]) is nn.Linear


def _join(parent: nn.Module, names: Sequence[str], linears: Sequence[nn.Linear]) -> None:
    weights: list[torch.Tensor] = [linear.weight for linear in linears]
    weight = nn.Parameter(torch.cat(weights), requires_grad=False)
    biases: list[torch.Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
    lo = 0
    for name, linear in zip(names, linears, strict=True):
        hi = lo + linear.out_features
        setattr(parent, name, JointLinear(weight, bias, lo, hi))
        lo = hi
