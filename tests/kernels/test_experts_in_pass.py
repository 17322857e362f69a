"""Experts of a pass: both ways of the GPU against the reference, and sorting by expert."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from freetoken.kernels import reference_experts
from freetoken.kernels.expert_inputs import ExpertMatrices, Routing
from freetoken.kernels.ops import PostNorm
from freetoken.kernels.reference_experts import group_pairs
from tests.kernels.expert_cases import DEVICE, DTYPES, GATES, Case, needs_triton

WAYS = ["tiles", "library"]


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """F.grouped_mm for every type, rows behind the last group undefined as there."""
    out = x.new_full((len(x), weight.shape[2]), torch.nan)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        out[start:end] = x[start:end] @ weight[expert]
        start = end
    return out


def check(
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    case: Case,
    routing: Routing,
    post_norm: PostNorm = None,
) -> None:
    from freetoken.kernels import triton_pass_experts

    if way == "library":
        monkeypatch.setattr(triton_pass_experts, "has_fast_grouped_mm", lambda *_: True)
        monkeypatch.setattr(F, "grouped_mm", grouped_mm)
    else:
        monkeypatch.setattr(triton_pass_experts, "has_fast_grouped_mm", lambda *_: False)
    matrices = ExpertMatrices.of(case.views(case.num_experts))
    args = (case.tokens(), routing, matrices, case.gate, post_norm)
    expected = reference_experts.experts_in_pass(*args)
    case.compare(triton_pass_experts.experts_in_pass(*args), expected)


@needs_triton
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_kernels_equal_the_reference(
    monkeypatch: pytest.MonkeyPatch, way: str, name: str, has_bias: bool
) -> None:
    gate = GATES[name]
    case = Case(7, has_bias=has_bias, gate=gate, is_gated=gate.is_gated)
    check(monkeypatch, way, case, case.routing())


@needs_triton
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 70])
def test_kernels_equal_the_reference_in_every_type(
    monkeypatch: pytest.MonkeyPatch, way: str, dtype: torch.dtype, num_tokens: int
) -> None:
    case = Case(num_tokens, dtype=dtype, hidden=136, expert_hidden=72, has_bias=True)
    check(monkeypatch, way, case, case.routing(low=-1))


@needs_triton
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kept", [0, 4])
def test_skipped_pairs_and_padding_give_nothing(
    monkeypatch: pytest.MonkeyPatch, way: str, kept: int
) -> None:
    case = Case(5, has_bias=True)
    check(monkeypatch, way, case, case.routing(low=-2, num_tokens=kept))


@needs_triton
@pytest.mark.parametrize("way", WAYS)
def test_a_gate_that_is_not_known_runs_between_the_products(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    def gate(product: torch.Tensor) -> torch.Tensor:
        first, second = product.chunk(2, dim=-1)
        return torch.cos(first) * second

    case = Case(5, gate=gate, has_bias=True)
    check(monkeypatch, way, case, case.routing(low=-1))


@needs_triton
@pytest.mark.parametrize("way", WAYS)
def test_post_norm_sees_each_expert_before_the_weights(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    case = Case(5, has_bias=True)
    norm = lambda y: y / y.norm(dim=-1, keepdim=True).clamp(min=1e-3)  # noqa: E731
    check(monkeypatch, way, case, case.routing(low=-1), norm)


@needs_triton
@pytest.mark.parametrize("way", WAYS)
def test_one_expert_may_have_all_tokens(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    case = Case(150, top_k=1)
    routing = case.routing()
    check(monkeypatch, way, case, replace(routing, ids=torch.full_like(routing.ids, 3)))


@needs_triton
def test_pairs_are_sorted_as_groups_list_them() -> None:
    from freetoken.kernels.triton_pass_experts import sort_pairs

    case = Case(9, num_experts=6)
    routing = case.routing(low=-2, num_tokens=7)
    order, groups = sort_pairs(routing, 6), group_pairs(routing, 6)
    num_active = int(groups.num_active)
    for i, expert in enumerate(groups.active[:num_active].tolist()):
        start = 0 if expert == 0 else int(order.ends[expert - 1])
        pairs = groups.pairs[groups.offsets[i] : groups.offsets[i + 1]]
        assert order.pairs[start : order.ends[expert]].tolist() == pairs.tolist()
        assert order.experts[start : order.ends[expert]].eq(expert).all()
    assert int(order.ends[-1]) == int(groups.offsets[num_active])
    numbers = torch.arange(len(order.pairs), device=DEVICE)
    assert torch.equal(order.place().long()[order.pairs], numbers)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.gpu
def test_the_library_computes_from_strided_rows() -> None:
    from freetoken.kernels import triton_pass_experts
    from freetoken.kernels.grouped_library import has_fast_grouped_mm

    case = Case(64, hidden=128, expert_hidden=64, has_bias=True, dtype=torch.bfloat16)
    matrices = ExpertMatrices.of(case.views(case.num_experts))
    if not has_fast_grouped_mm(case.tokens(), matrices.up, matrices.down):
        pytest.skip("this device has no fast grouped product")
    args = (case.tokens(), case.routing(low=-1), matrices, case.gate)
    expected = reference_experts.experts_in_pass(*args)
    case.compare(triton_pass_experts.experts_in_pass(*args), expected)
