"""Routed experts in plain torch: the specification of every expert kernel, and the CPU's way.

Tokens are grouped by expert, each group goes through its expert's two products, and the outputs
are summed per token with the routing weights. Sums run over [T, K, C] in a fixed order, so a
result does not depend on how tokens were grouped.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

import torch
import torch.nn.functional as F

from freetoken.kernels.ops import ExpertLinear, Gate, PostNorm

# Up to so many pairs Python counts runs faster than torch: 1 µs against 4 for 16 pairs.
FEW_PAIRS = 128


def grouped_experts(
    hidden: torch.Tensor,
    row_ids: torch.Tensor,
    weights: torch.Tensor,
    views: Mapping[str, torch.Tensor],
    gate: Gate,
    post_norm: PostNorm,
) -> torch.Tensor:
    """See ops.GroupedExperts."""
    up, down = list(views)[:2]

    def linear(row: int, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = views.get(f"{name}_bias")
        return F.linear(x, views[name][row], None if bias is None else bias[row])

    return routed_experts(
        hidden, row_ids, weights, linear, up, down, len(views[up]), gate, post_norm
    )


def routed_experts(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    linear: ExpertLinear,
    up: str,
    down: str,
    num_experts: int,
    gate: Gate,
    post_norm: PostNorm = None,
) -> torch.Tensor:
    """hidden: [T, C], ids: [T, K] (outside [0, num_experts): skip), weights: [T, K] → [T, C].

    `linear` computes one expert's matrix for a group of tokens.
    """
    num_tokens, top_k = ids.shape
    if num_tokens == 1:
        return _one_token(hidden, ids, weights, linear, up, down, num_experts, gate, post_norm)
    pairs, groups = group_by_expert(ids, num_experts)
    if not groups:
        return torch.zeros_like(hidden)
    x = hidden.index_select(0, pairs // top_k)
    x = _per_group(x, groups, linear, up)
    x = gate(x)
    x = _per_group(x, groups, linear, down)
    if post_norm is not None:
        x = post_norm(x)
    if len(pairs) == ids.numel():
        place = torch.empty_like(pairs)
        place[pairs] = torch.arange(len(pairs), device=pairs.device)
        x = x.index_select(0, place)
    else:
        x = x.new_zeros(ids.numel(), x.shape[1]).index_copy_(0, pairs, x)
    x = x.view(num_tokens, top_k, -1) * weights.unsqueeze(-1)
    return x.sum(1).to(hidden.dtype)


def group_by_expert(
    ids: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
    """Sort token-expert pairs by expert.

    Returns pairs [S'] int64, the flat indices into ids [T, K] that are not skipped, and
    (expert, lo, hi) for each group `[lo, hi)` of them.
    """
    flat, pairs = ids.flatten().sort(stable=True)
    groups = []
    first = lo = 0
    for expert, count in _runs(flat):
        if 0 <= expert < num_experts:
            groups.append((expert, lo, lo + count))
            lo += count
        elif expert < 0:
            first += count
    return pairs[first : first + lo], groups


def _runs(values: torch.Tensor) -> list[tuple[int, int]]:
    """(value, how often) of each run of equal values."""
    if len(values) <= FEW_PAIRS:
        return [(value, len(list(run))) for value, run in groupby(values.tolist())]
    found, counts = torch.unique_consecutive(values, return_counts=True)
    return list(zip(found.tolist(), counts.tolist(), strict=True))


def _per_group(
    x: torch.Tensor, groups: list[tuple[int, int, int]], linear: ExpertLinear, name: str
) -> torch.Tensor:
    parts = [linear(expert, name, x[lo:hi]) for expert, lo, hi in groups]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _one_token(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    linear: ExpertLinear,
    up: str,
    down: str,
    num_experts: int,
    gate: Gate,
    post_norm: PostNorm,
) -> torch.Tensor:
    """T = 1: every expert sees the same row, so nothing needs sorting."""
    chosen = ids[0].tolist()
    if min(chosen) < 0 or max(chosen) >= num_experts:
        kept = [k for k, expert in enumerate(chosen) if 0 <= expert < num_experts]
        if not kept:
            return torch.zeros_like(hidden)
        weights = weights[:, kept]
        chosen = [chosen[k] for k in kept]
    x = gate(torch.cat([linear(expert, up, hidden) for expert in chosen]))
    x = torch.cat([linear(expert, down, x[k : k + 1]) for k, expert in enumerate(chosen)])
    if post_norm is not None:
        x = post_norm(x)
    return (x * weights[0].unsqueeze(-1)).sum(0, keepdim=True).to(hidden.dtype)
