"""Signatures of the experts that are computed in place on the CPU, and names that all share.

`reference.py` is their specification. Experts in slots and in passes: `expert_ops.py`.

Shapes: T tokens, K experts a token, S = T·K token-expert pairs, C hidden, F expert hidden,
N rows of a slot pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

# Maps the up product [S, 2F] (or [S, F] without a gate) to [S, F]; elementwise over S.
Gate = Callable[[torch.Tensor], torch.Tensor]
# Applied to each expert's output [S, C] before the routing weights; None in most families.
PostNorm = Callable[[torch.Tensor], torch.Tensor] | None
# (matrix name, numbers of experts or rows, for each its tokens [S, in]) → for each [S, out],
# bias included.
ExpertLinear = Callable[[str, Sequence[int], Sequence[torch.Tensor]], list[torch.Tensor]]


class GroupedExperts(Protocol):
    """Computes routed experts from rows of weights.

    hidden: [T, C] · row_ids: [T, K] int64, the row of each token's experts; negative: skip ·
    weights: [T, K] · views: the layout's tensors as [N, *shape] · returns [T, C] in hidden's dtype.
    """

    def __call__(
        self,
        hidden: torch.Tensor,
        row_ids: torch.Tensor,
        weights: torch.Tensor,
        views: Mapping[str, torch.Tensor],
        gate: Gate,
        post_norm: PostNorm,
    ) -> torch.Tensor: ...
