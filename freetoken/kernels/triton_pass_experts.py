"""Routed experts of a chunk of a pass on the GPU: pairs sorted by expert, two grouped products.

Where the library has a fast grouped product it is used, elsewhere a Triton one that gathers its
inputs and computes the gate itself. Grids and sizes follow from shapes: nothing waits for the
device. Skipped pairs sort behind all experts and belong to none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton

from freetoken.kernels.expert_inputs import ExpertMatrices, Routing
from freetoken.kernels.gates import GateKind
from freetoken.kernels.grouped_library import has_fast_grouped_mm
from freetoken.kernels.ops import Gate, PostNorm
from freetoken.kernels.triton_on_demand import NO_GATE, combine
from freetoken.kernels.triton_pass_kernels import gate_kernel, tile_product_kernel

GATE_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """Pairs (token · K + k) by expert: pairs [S] int64, experts [S] int16 (E: skipped) ·
    ends [E] int32: where in them each expert's pairs end."""

    pairs: torch.Tensor
    experts: torch.Tensor
    ends: torch.Tensor
    top_k: int

    def place(self) -> torch.Tensor:
        """[S] int32: where in `pairs` each pair is."""
        count = len(self.pairs)
        numbers = torch.arange(count, dtype=torch.int32, device=self.pairs.device)
        return torch.empty_like(numbers).scatter_(0, self.pairs, numbers)

    def bias(self, biases: torch.Tensor) -> torch.Tensor:
        """biases: [E, out] → [S, out], that of each pair's expert; any one for skipped pairs."""
        return biases.index_select(0, self.experts.long().clamp(max=len(biases) - 1))


def sort_pairs(routing: Routing, num_experts: int) -> SortedPairs:
    """Sort by expert, stable. 16-bit keys: a radix sort of half the passes."""
    assert num_experts < 2**15, num_experts
    key = torch.where(routing.kept(num_experts), routing.ids, num_experts).flatten()
    experts, pairs = key.to(torch.int16).sort(stable=True)
    numbers = torch.arange(num_experts, dtype=torch.int16, device=key.device)
    ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
    return SortedPairs(pairs, experts, ends, routing.ids.shape[1])


def experts_in_pass(
    hidden: torch.Tensor,
    routing: Routing,
    matrices: ExpertMatrices,
    gate: GateKind | Gate,
    post_norm: PostNorm = None,
) -> torch.Tensor:
    """See expert_ops."""
    routing = routing.contiguous()
    hidden = hidden.contiguous()
    num_experts = len(matrices.up)
    order = sort_pairs(routing, num_experts)
    if has_fast_grouped_mm(hidden, matrices.up, matrices.down):
        y = _library_products(hidden, order, matrices, gate)
    else:
        y = _tile_products(hidden, order, matrices, gate)
    bias = matrices.down_bias
    if post_norm is not None:
        y = post_norm(y if bias is None else y + order.bias(bias))
        bias = None
    return combine(y, routing, num_experts, order.place(), bias)


def _library_products(
    hidden: torch.Tensor, order: SortedPairs, matrices: ExpertMatrices, gate: GateKind | Gate
) -> torch.Tensor:
    """[S, C] in sorted order, without the down bias. Rows of skipped pairs are undefined."""
    x = hidden.index_select(0, order.pairs // order.top_k)
    product = F.grouped_mm(x, matrices.up.transpose(1, 2), offs=order.ends)
    del x
    if isinstance(gate, GateKind):
        act = apply_gate(product, order.experts, matrices.up_bias, gate)
    else:
        if matrices.up_bias is not None:
            product += order.bias(matrices.up_bias)
        act = gate(product)
    del product
    return F.grouped_mm(act, matrices.down.transpose(1, 2), offs=order.ends)


def _tile_products(
    hidden: torch.Tensor, order: SortedPairs, matrices: ExpertMatrices, gate: GateKind | Gate
) -> torch.Tensor:
    """As _library_products with our own kernel."""
    kind = gate if isinstance(gate, GateKind) else NO_GATE
    act = tile_product(hidden, order, matrices.up, matrices.up_bias, kind, gathers=True)
    if not isinstance(gate, GateKind):
        act = gate(act).contiguous()
    return tile_product(act, order, matrices.down, None, NO_GATE, gathers=False)


def apply_gate(
    product: torch.Tensor, experts: torch.Tensor, bias: torch.Tensor | None, gate: GateKind
) -> torch.Tensor:
    """product: [S, 2F or F], experts: [S] int16, bias: [E, 2F or F] → gate(sum) [S, F]."""
    num_pairs, width = product.shape
    outputs = width // 2 if gate.is_gated else width
    out = product.new_empty(num_pairs, outputs)
    gate_kernel[(num_pairs, triton.cdiv(outputs, GATE_BLOCK))](
        product,
        experts,
        bias,
        0 if bias is None else bias.stride(0),
        out,
        0 if bias is None else len(bias),
        OUT=outputs,
        ACTIVATION=gate.activation,
        GATED=gate.is_gated,
        INTERLEAVED=gate.interleaved,
        ALPHA=gate.alpha,
        LIMIT=gate.limit,
        UP_SHIFT=gate.up_shift,
        HAS_BIAS=bias is not None,
        BLOCK=GATE_BLOCK,
        num_warps=4,
    )
    return out


def tile_product(
    x: torch.Tensor,
    order: SortedPairs,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate: GateKind,
    gathers: bool,
) -> torch.Tensor:
    """x: [T, in] with `gathers`, else [S, in] in sorted order; weight: [E, rows, in] → [S, out]."""
    num_pairs = len(order.pairs)
    num_experts, rows, inputs = weight.shape
    outputs = rows // 2 if gate.is_gated else rows
    out = x.new_empty(num_pairs, outputs)
    block_m, block_n, block_k, stages, warps = _tile_sizes(
        num_pairs / num_experts, gate, x.itemsize
    )
    num_tiles = triton.cdiv(num_pairs, block_m) + num_experts
    tile_product_kernel[(triton.cdiv(outputs, block_n), num_tiles)](
        x,
        x.stride(0),
        weight,
        weight.stride(0),
        bias,
        0 if bias is None else bias.stride(0),
        out,
        order.pairs,
        order.ends,
        num_experts,
        MAX_EXPERTS=triton.next_power_of_2(num_experts),
        PAIRS_PER_X=order.top_k,
        IN=inputs,
        OUT=outputs,
        GATHERS=gathers,
        ACTIVATION=gate.activation,
        GATED=gate.is_gated,
        INTERLEAVED=gate.interleaved,
        ALPHA=gate.alpha,
        LIMIT=gate.limit,
        UP_SHIFT=gate.up_shift,
        HAS_BIAS=bias is not None,
        BM=block_m,
        BN=block_n,
        BK=block_k,
        STAGES=stages,
        num_warps=warps,
    )
    return out


def _tile_sizes(
    pairs_per_expert: float, gate: GateKind, itemsize: int
) -> tuple[int, int, int, int, int]:
    """block_m, block_n, block_k, stages, warps: at most 96 KiB in flight, 64 fp32 sums a thread."""
    block_n = 64 if gate.is_gated else 128
    block_k = 128 // itemsize
    if pairs_per_expert >= 96:
        return 128, block_n, block_k, 3, 8
    if pairs_per_expert >= 24:
        return 64, block_n, block_k, 3, 4
    return 16, block_n, block_k, 4, 4
