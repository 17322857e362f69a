"""Routed experts that are computed in place, in plain torch: the CPU's way.

Tokens are grouped by expert, each group goes through its expert's two products, and the outputs
are summed per token with the routing weights. A token's sum runs over k in order, so a result does
not depend on how tokens were grouped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from freetoken.kernels.ops import ExpertLinear, Gate, PostNorm

# Up to so many pairs Python groups faster than torch: 8 µs against 20 for 16 pairs.
FEW_PAIRS = 128


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
    if len(ids) == 1:
        return _one_token(hidden, ids, weights, linear, up, down, num_experts, gate, post_norm)
    pairs = group_by_expert(ids, num_experts)
    if not pairs.experts:
        return torch.zeros_like(hidden)
    x = hidden.index_select(0, pairs.tokens)
    x = gate(torch.cat(linear(up, pairs.experts, x.split_with_sizes(pairs.sizes))))
    x = torch.cat(linear(down, pairs.experts, x.split_with_sizes(pairs.sizes)))
    if post_norm is not None:
        x = post_norm(x)
    return _weighted_sum(x, pairs, weights).to(hidden.dtype)


@dataclass(frozen=True, slots=True)
class GroupedPairs:
    """Token-expert pairs that are not skipped, S of them, sorted by expert.

    experts, sizes: each expert and how many pairs it has · tokens: [S] int64, token of each pair ·
    places: [S] int64, where in the sorted order each pair is, token by token ·
    offsets: [T] int64, where in `places` each token starts · kept: [S] int64, flat indices of the
    pairs into ids [T, K], token by token; None when no pair is skipped.
    """

    experts: list[int]
    sizes: list[int]
    tokens: torch.Tensor
    places: torch.Tensor
    offsets: torch.Tensor
    kept: torch.Tensor | None


def group_by_expert(ids: torch.Tensor, num_experts: int) -> GroupedPairs:
    """Sort the pairs of ids [T, K] by expert, those of one expert by token."""
    return _group_few(ids, num_experts) if ids.numel() <= FEW_PAIRS else _group(ids, num_experts)


def _group_few(ids: torch.Tensor, num_experts: int) -> GroupedPairs:
    """In plain Python, which for few pairs takes less time than the operators."""
    top_k = ids.shape[1]
    by_expert: dict[int, list[int]] = {}
    offsets: list[int] = []
    kept: list[int] = []
    for token, chosen in enumerate(ids.tolist()):
        offsets.append(len(kept))
        for pair, expert in enumerate(chosen, token * top_k):
            if 0 <= expert < num_experts:
                by_expert.setdefault(expert, []).append(pair)
                kept.append(pair)
    experts = sorted(by_expert)
    order = [pair for expert in experts for pair in by_expert[expert]]
    place_of = {pair: place for place, pair in enumerate(order)}
    numbers = [pair // top_k for pair in order]
    numbers += [place_of[pair] for pair in kept]
    numbers += offsets
    numbers += kept
    # By way of numpy: torch.tensor takes three times as long for a list.
    flat = torch.from_numpy(np.array(numbers, dtype=np.int64)).to(ids.device)
    tokens, places, starts, kept_pairs = flat.split_with_sizes(
        [len(kept), len(kept), len(offsets), len(kept)]
    )
    return GroupedPairs(
        experts,
        [len(by_expert[expert]) for expert in experts],
        tokens,
        places,
        starts,
        kept_pairs if len(kept) < ids.numel() else None,
    )


def _group(ids: torch.Tensor, num_experts: int) -> GroupedPairs:
    num_tokens, top_k = ids.shape
    flat, order = ids.flatten().sort(stable=True)
    found, counts = torch.unique_consecutive(flat, return_counts=True)
    runs = list(zip(found.tolist(), counts.tolist(), strict=True))
    groups = [(expert, count) for expert, count in runs if 0 <= expert < num_experts]
    kept = None
    per_token = torch.full((num_tokens,), top_k, device=ids.device)
    if len(groups) < len(runs):
        first = sum(count for expert, count in runs if expert < 0)
        order = order[first : first + sum(count for _, count in groups)]
        inside = (ids >= 0) & (ids < num_experts)
        kept = inside.flatten().nonzero().flatten()
        per_token = inside.sum(1)
    return GroupedPairs(
        [expert for expert, _ in groups],
        [count for _, count in groups],
        order // top_k,
        order.argsort(),
        per_token.cumsum(0) - per_token,
        kept,
    )


def _weighted_sum(x: torch.Tensor, pairs: GroupedPairs, weights: torch.Tensor) -> torch.Tensor:
    """x: [S, C], sorted by expert → [T, C]: each token's outputs, in order of k, in one sum."""
    flat = weights.flatten()
    if pairs.kept is not None:
        flat = flat.index_select(0, pairs.kept)
    if flat.dtype != x.dtype:
        dtype = torch.promote_types(x.dtype, flat.dtype)
        x, flat = x.to(dtype), flat.to(dtype)
    summed: torch.Tensor = torch.embedding_bag(
        x, pairs.places, pairs.offsets, False, 0, False, flat
    )[0]
    return summed


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
