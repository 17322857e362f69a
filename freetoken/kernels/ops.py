"""Signatures of the functions that expert kernels are given.

Shapes: S = T·K token-expert pairs, C hidden, F expert hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# Maps the up product [S, 2F] (or [S, F] without a gate) to [S, F]; elementwise over S.
Gate = Callable[[torch.Tensor], torch.Tensor]
# Applied to each expert's output [S, C] before the routing weights; None in most families.
PostNorm = Callable[[torch.Tensor], torch.Tensor] | None
# (matrix name, numbers of experts or rows, for each its tokens [S, in]) → for each [S, out],
# bias included.
ExpertLinear = Callable[[str, Sequence[int], Sequence[torch.Tensor]], list[torch.Tensor]]
