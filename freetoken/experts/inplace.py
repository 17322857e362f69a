"""Experts computed from the bank where it lies: the CPU's default."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from freetoken.experts.bank import ExpertBank
from freetoken.kernels.inplace_experts import routed_experts
from freetoken.kernels.ops import Gate, PostNorm


class InPlaceExperts:
    """The routed experts of one layer."""

    def __init__(self, bank: ExpertBank, gate: Gate, post_norm: PostNorm = None) -> None:
        self.bank = bank
        self._gate = gate
        self._post_norm = post_norm
        self._distinct = 0

    def __call__(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden: [T, C], ids and weights: [T, K] → [T, C]; ids outside [0, E) are skipped."""
        layout = self.bank.layout
        return routed_experts(
            hidden,
            ids,
            weights,
            self._linear,
            layout.up,
            layout.down,
            self.bank.num_experts,
            self._gate,
            self._post_norm,
        )

    def take_distinct(self) -> int:
        """Experts computed since the last call, each once per step."""
        distinct, self._distinct = self._distinct, 0
        return distinct

    def _linear(
        self, name: str, experts: Sequence[int], xs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        if name == self.bank.layout.up:
            self._distinct += len(experts)
        return self.bank.linear(name, experts, xs)
