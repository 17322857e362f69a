"""What the expert kernels are given beside hidden states: weights, groups, and the routing.

Shapes: T tokens, K experts a token, E experts, R rows of weights, C hidden, F expert hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """An expert layout's tensors as views into rows: strided by whole rows, else contiguous.

    up: [R, 2F, C], or [R, F, C] without a gate · down: [R, C, F] · biases: [R, out], both or none.
    """

    up: torch.Tensor
    down: torch.Tensor
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    @classmethod
    def of(cls, views: Mapping[str, torch.Tensor]) -> Self:
        """From the views of a layout, which are in the order of the fields."""
        return cls(*views.values())


@dataclass(frozen=True, slots=True)
class Groups:
    """The experts that a step needs and their token-expert pairs; int32, on the weights' device.

    rows [E]: each expert's row of weights · active [E], num_active [1]: experts that are needed ·
    offsets [E + 1], pairs: pairs[offsets[i] : offsets[i + 1]] are the pairs (token · K + k) of
    active[i]; offsets behind num_active repeat the number of pairs, the other entries there are
    leftovers, but within bounds. Pairs that are to be skipped are in no group.
    """

    rows: torch.Tensor
    active: torch.Tensor
    num_active: torch.Tensor
    offsets: torch.Tensor
    pairs: torch.Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """ids: [T, K] int32 or int64; outside [0, E): skip · weights: [T, K], any float type ·
    num_tokens: [1] int32, tokens beyond it are padding and give zero, or None: all count."""

    ids: torch.Tensor
    weights: torch.Tensor
    num_tokens: torch.Tensor | None = None

    def contiguous(self) -> Routing:
        """The same, as kernels address it."""
        return Routing(self.ids.contiguous(), self.weights.contiguous(), self.num_tokens)

    def kept(self, num_experts: int) -> torch.Tensor:
        """[T, K] bool: the pairs that are not skipped."""
        kept = (self.ids >= 0) & (self.ids < num_experts)
        if self.num_tokens is not None:
            tokens = torch.arange(len(self.ids), device=self.ids.device)
            kept &= (tokens < self.num_tokens).unsqueeze(1)
        return kept
