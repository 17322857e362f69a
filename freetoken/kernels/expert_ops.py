"""Routed experts for callers: the reference on the CPU, Triton and library kernels on a GPU.

Two forms: on demand, from rows anywhere in a pool, for steps of few tokens, fit for CUDA graphs; in
a pass, from all rows of a layer in a buffer, for chunks of thousands. Neither waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from freetoken.kernels import reference_experts
from freetoken.kernels.dispatch import use_triton
from freetoken.kernels.expert_inputs import ExpertMatrices, Groups, Routing
from freetoken.kernels.gates import GateKind
from freetoken.kernels.ops import Gate, PostNorm


def experts_on_demand(
    hidden: torch.Tensor,
    routing: Routing,
    groups: Groups,
    views: Mapping[str, torch.Tensor],
    gate: GateKind | Gate,
    post_norm: PostNorm = None,
) -> torch.Tensor:
    """hidden: [T, C] → the sum of each token's experts, [T, C] in hidden's dtype.

    groups must belong to the routing. views: the layout's tensors as [R, *shape]. A gate that is a
    GateKind is computed inside the kernels, any other runs between them.
    """
    if len(hidden) == 0:
        return hidden.clone()
    if use_triton(hidden):
        from freetoken.kernels import triton_on_demand

        compute = triton_on_demand.experts_on_demand
    else:
        compute = reference_experts.experts_on_demand
    return compute(hidden, routing, groups, ExpertMatrices.of(views), gate, post_norm)


def experts_in_pass(
    hidden: torch.Tensor,
    routing: Routing,
    views: Mapping[str, torch.Tensor],
    gate: GateKind | Gate,
    post_norm: PostNorm = None,
) -> torch.Tensor:
    """As experts_on_demand, expert e in row e of the views [E, *shape]; for many tokens.

    On a GPU its temporaries are up to S · (C + 2F) elements at a time, S = T · K pairs.
    """
    if len(hidden) == 0:
        return hidden.clone()
    if use_triton(hidden):
        from freetoken.kernels import triton_pass_experts

        compute = triton_pass_experts.experts_in_pass
    else:
        compute = reference_experts.experts_in_pass
    return compute(hidden, routing, ExpertMatrices.of(views), gate, post_norm)
