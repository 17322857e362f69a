"""Routed experts over groups and over whole layers in plain torch: the kernels' specification."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F

from freetoken.kernels.expert_inputs import ExpertMatrices, Groups, Routing
from freetoken.kernels.gates import GateKind
from freetoken.kernels.ops import Gate, PostNorm


def experts_on_demand(
    hidden: torch.Tensor,
    routing: Routing,
    groups: Groups,
    matrices: ExpertMatrices,
    gate: GateKind | Gate,
    post_norm: PostNorm = None,
) -> torch.Tensor:
    """See expert_ops; groups are taken as they are, so that wrong ones are noticed."""
    num_active = int(groups.num_active)
    offsets = groups.offsets.tolist()
    rows = groups.rows.tolist()
    experts = groups.active[:num_active].tolist()
    parts = [
        (rows[expert], groups.pairs[offsets[i] : offsets[i + 1]].long())
        for i, expert in enumerate(experts)
    ]
    return _compute(hidden, routing, parts, len(rows), matrices, gate, post_norm)


def experts_in_pass(
    hidden: torch.Tensor,
    routing: Routing,
    matrices: ExpertMatrices,
    gate: GateKind | Gate,
    post_norm: PostNorm = None,
) -> torch.Tensor:
    """See expert_ops."""
    num_experts = len(matrices.up)
    key = torch.where(routing.kept(num_experts), routing.ids, num_experts).flatten()
    experts = torch.unique(key).tolist()
    parts = [(e, torch.where(key == e)[0]) for e in experts if e < num_experts]
    return _compute(hidden, routing, parts, num_experts, matrices, gate, post_norm)


def group_pairs(routing: Routing, num_experts: int, rows: torch.Tensor | None = None) -> Groups:
    """The groups of a routing; rows [E] int32, expert e in row e if None. Waits for the device."""
    key = torch.where(routing.kept(num_experts), routing.ids, num_experts).flatten()
    key, pairs = key.sort(stable=True)
    experts, counts = torch.unique_consecutive(key, return_counts=True)
    num_active = int((experts < num_experts).sum())
    active = torch.zeros(num_experts, dtype=torch.int32, device=key.device)
    active[:num_active] = experts[:num_active]
    ends = counts[:num_active].cumsum(0)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=key.device)
    offsets[1 : num_active + 1] = ends
    offsets[num_active + 1 :] = offsets[num_active].clone()
    if rows is None:
        rows = torch.arange(num_experts, dtype=torch.int32, device=key.device)
    count = torch.tensor([num_active], dtype=torch.int32, device=key.device)
    return Groups(rows, active, count, offsets, pairs.int())


def _compute(
    hidden: torch.Tensor,
    routing: Routing,
    parts: Iterable[tuple[int, torch.Tensor]],
    num_experts: int,
    matrices: ExpertMatrices,
    gate: GateKind | Gate,
    post_norm: PostNorm,
) -> torch.Tensor:
    """parts: (row of weights, its pairs [S'] int64) for each active expert."""
    num_tokens, top_k = routing.ids.shape
    y = hidden.new_zeros(num_tokens * top_k, hidden.shape[1])
    for row, pairs in parts:
        x = hidden.index_select(0, pairs // top_k)
        x = gate(F.linear(x, matrices.up[row], _bias(matrices.up_bias, row)))
        x = F.linear(x, matrices.down[row], _bias(matrices.down_bias, row))
        y[pairs] = x if post_norm is None else post_norm(x)
    weights = torch.where(routing.kept(num_experts), routing.weights, 0)
    total = (y.view(num_tokens, top_k, -1) * weights.unsqueeze(-1)).sum(1)
    return total.to(hidden.dtype)


def _bias(biases: torch.Tensor | None, row: int) -> torch.Tensor | None:
    return None if biases is None else biases[row]
