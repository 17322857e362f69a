"""Routed experts in plain torch: the specification of every expert kernel, and the CPU's way.

Tokens are grouped by expert, each group goes through its expert's two products, and the outputs
are summed per token with the routing weights. Sums run over [T, K, C] in a fixed order, so a
result does not depend on how tokens were grouped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    def linear(name: str, rows: Sequence[int], xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        weight, bias = views[name], views.get(f"{name}_bias")
        return [
            F.linear(x, weight[row], None if bias is None else bias[row])
            for row, x in zip(rows, xs, strict=True)
        ]

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

    `linear` computes the matrices of several experts, each for its group of tokens.
    """
    num_tokens, top_k = ids.shape
    if num_tokens == 1:
        return _one_token(hidden, ids, weights, linear, up, down, num_experts, gate, post_norm)
    pairs, groups = group_by_expert(ids, num_experts)
    if not groups:
        return torch.zeros_like(hidden)
    experts = [expert for expert, _ in groups]
    sizes = [count for _, count in groups]
    x = hidden.index_select(0, pairs // top_k)
    x = gate(torch.cat(linear(up, experts, x.split(sizes))))
    x = torch.cat(linear(down, experts, x.split(sizes)))
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
) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Sort token-expert pairs by expert.

    Returns pairs [S'] int64, the flat indices into ids [T, K] that are not skipped, and
    (expert, how many of them) for each group, in their order.
    """
    flat, pairs = ids.flatten().sort(stable=True)
    runs = _runs(flat)
    groups = [(expert, count) for expert, count in runs if 0 <= expert < num_experts]
    if len(groups) < len(runs):
        first = sum(count for expert, count in runs if expert < 0)
        pairs = pairs[first : first + sum(count for _, count in groups)]
    return pairs, groups


def _runs(values: torch.Tensor) -> list[tuple[int, int]]:
    """(value, how often) of each run of equal values."""
    if len(values) <= FEW_PAIRS:
        return [(value, len(list(run))) for value, run in groupby(values.tolist())]
    found, counts = torch.unique_consecutive(values, return_counts=True)
    return list(zip(found.tolist(), counts.tolist(), strict=True))


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
    x = gate(torch.cat(linear(up, chosen, [hidden] * len(chosen))))
    x = torch.cat(linear(down, chosen, x.split(1)))
    if post_norm is not None:
        x = post_norm(x)
    return (x * weights[0].unsqueeze(-1)).sum(0, keepdim=True).to(hidden.dtype)
