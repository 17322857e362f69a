"""Routed experts of an on-demand step on the GPU: chooses and launches the kernels.

Nothing here waits for the device or depends on its values, so a CUDA graph can hold it: grids
follow from shapes, and programs beyond the active experts leave at once.
"""

from __future__ import annotations

import torch
import triton

from freetoken.kernels.expert_inputs import ExpertMatrices, Groups, Routing
from freetoken.kernels.expert_launches import Launch, Work, choose_down, choose_up
from freetoken.kernels.gates import GateKind
from freetoken.kernels.ops import Gate, PostNorm
from freetoken.kernels.triton_experts import (
    combine_kernel,
    group_dot_kernel,
    group_gemv_kernel,
    token_down_kernel,
)

NO_GATE = GateKind("identity", is_gated=False)
# Two warps: 16 bytes of bf16 a thread.
COMBINE_BLOCK = 512


def experts_on_demand(
    hidden: torch.Tensor,
    routing: Routing,
    groups: Groups,
    matrices: ExpertMatrices,
    gate: GateKind | Gate,
    post_norm: PostNorm = None,
) -> torch.Tensor:
    """See expert_ops."""
    routing = routing.contiguous()
    hidden = hidden.contiguous()
    if isinstance(gate, GateKind):
        act = up_product(hidden, routing, groups, matrices, gate)
    else:
        act = gate(up_product(hidden, routing, groups, matrices, NO_GATE)).contiguous()
    work = down_work(routing, matrices, len(groups.rows))
    launch = choose_down(work, sums_over_k=post_norm is None)
    if launch.method == "token":
        return token_down(act, routing, groups.rows, matrices, launch)
    y = down_product(act, routing, groups, matrices, launch)
    return combine(y if post_norm is None else post_norm(y), routing, len(groups.rows))


def up_work(routing: Routing, matrices: ExpertMatrices, gate: GateKind, num_experts: int) -> Work:
    """The first product as the launch table sees it."""
    _, rows, inputs = matrices.up.shape
    num_matrices = 2 if gate.is_gated else 1
    num_tokens, top_k = routing.ids.shape
    itemsize = matrices.up.itemsize
    outputs = rows // num_matrices
    return Work(num_tokens, top_k, num_experts, inputs, outputs, num_matrices, itemsize)


def down_work(routing: Routing, matrices: ExpertMatrices, num_experts: int) -> Work:
    """The second product as the launch table sees it."""
    _, outputs, inputs = matrices.down.shape
    num_tokens, top_k = routing.ids.shape
    return Work(num_tokens, top_k, num_experts, inputs, outputs, 1, matrices.down.itemsize)


def up_product(
    hidden: torch.Tensor,
    routing: Routing,
    groups: Groups,
    matrices: ExpertMatrices,
    gate: GateKind,
    launch: Launch | None = None,
) -> torch.Tensor:
    """hidden: [T, C] → [T·K, F] by pair, after the gate; skipped pairs: undefined."""
    work = up_work(routing, matrices, gate, len(groups.rows))
    out = hidden.new_empty(routing.ids.numel(), work.outputs)
    weights = (matrices.up, matrices.up_bias)
    _group_product(hidden, out, weights, groups, gate, work, launch or choose_up(work))
    return out


def down_product(
    act: torch.Tensor,
    routing: Routing,
    groups: Groups,
    matrices: ExpertMatrices,
    launch: Launch | None = None,
) -> torch.Tensor:
    """act: [T·K, F] → [T·K, C], without the routing weights; skipped pairs: undefined."""
    work = down_work(routing, matrices, len(groups.rows))
    out = act.new_empty(len(act), work.outputs)
    weights = (matrices.down, matrices.down_bias)
    launch = launch or choose_down(work, sums_over_k=False)
    _group_product(act, out, weights, groups, NO_GATE, work, launch)
    return out


def token_down(
    act: torch.Tensor,
    routing: Routing,
    rows: torch.Tensor,
    matrices: ExpertMatrices,
    launch: Launch | None = None,
) -> torch.Tensor:
    """act: [T·K, F] → [T, C]: the down product summed with the routing weights, in one kernel."""
    work = down_work(routing, matrices, len(rows))
    launch = launch or choose_down(work, sums_over_k=True)
    out = act.new_empty(work.num_tokens, work.outputs)
    bias = matrices.down_bias
    token_down_kernel[(triton.cdiv(work.outputs, launch.block_n), work.num_tokens)](
        act,
        matrices.down,
        matrices.down.stride(0),
        bias,
        0 if bias is None else bias.stride(0),
        out,
        routing.ids,
        routing.weights,
        rows,
        routing.num_tokens,
        len(rows),
        TOP_K=work.top_k,
        IN=work.inputs,
        OUT=work.outputs,
        HAS_BIAS=bias is not None,
        HAS_NUM_TOKENS=routing.num_tokens is not None,
        BN=launch.block_n,
        BC=triton.next_power_of_2(work.top_k),
        BK=launch.block_k,
        num_warps=launch.warps,
    )
    return out


def combine(
    y: torch.Tensor,
    routing: Routing,
    num_experts: int,
    place: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Σ over k of weights · (y + bias), in order of k: y [S, C] → [T, C] in y's dtype.

    place: [S] int, where in y each pair is; None: at its own number · bias: [E, C].
    """
    num_tokens, top_k = routing.ids.shape
    outputs = y.shape[1]
    out = y.new_empty(num_tokens, outputs)
    combine_kernel[(num_tokens, triton.cdiv(outputs, COMBINE_BLOCK))](
        y,
        place,
        bias,
        0 if bias is None else bias.stride(0),
        out,
        routing.ids,
        routing.weights,
        routing.num_tokens,
        num_experts,
        TOP_K=top_k,
        OUT=outputs,
        HAS_PLACE=place is not None,
        HAS_BIAS=bias is not None,
        HAS_NUM_TOKENS=routing.num_tokens is not None,
        BLOCK=COMBINE_BLOCK,
        num_warps=2,
    )
    return out


def _group_product(
    x: torch.Tensor,
    out: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor | None],
    groups: Groups,
    gate: GateKind,
    work: Work,
    launch: Launch,
) -> None:
    weight, bias = weights
    num_pairs = len(out)
    kernel, extra = group_gemv_kernel, {}
    if launch.method == "dot":
        kernel, extra = group_dot_kernel, {"BM": launch.block_m}
    kernel[(triton.cdiv(work.outputs, launch.block_n), min(len(groups.rows), num_pairs))](
        x,
        x.stride(0),
        weight,
        weight.stride(0),
        bias,
        0 if bias is None else bias.stride(0),
        out,
        groups.rows,
        groups.active,
        groups.offsets,
        groups.pairs,
        PAIRS_PER_X=num_pairs // len(x),
        IN=work.inputs,
        OUT=work.outputs,
        ACTIVATION=gate.activation,
        GATED=gate.is_gated,
        INTERLEAVED=gate.interleaved,
        ALPHA=gate.alpha,
        LIMIT=gate.limit,
        UP_SHIFT=gate.up_shift,
        HAS_BIAS=bias is not None,
        BN=launch.block_n,
        BK=launch.block_k,
        STAGES=launch.stages,
        num_warps=launch.warps,
        **extra,
    )
