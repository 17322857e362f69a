"""The k largest in plain torch: the specification of triton_topk.py. See sample_ops.top_k."""

from __future__ import annotations

from torch import Tensor


def top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    # A stable sort and not topk, whose order of equals is undefined.
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], ids[:, :k]
