"""The on-demand expert kernels against the reference, and the reference against the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from freetoken.kernels import reference_experts
from freetoken.kernels.expert_inputs import ExpertMatrices, Groups, Routing
from freetoken.kernels.expert_launches import Launch
from freetoken.kernels.gates import GateKind
from freetoken.kernels.ops import PostNorm
from freetoken.kernels.reference_experts import group_pairs
from tests.kernels.expert_cases import DEVICE, DTYPES, GATES, Case, needs_triton

NUM_ROWS = 9


def rows_of(case: Case) -> torch.Tensor:
    """Experts in rows out of order, some rows unused."""
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(4))
    return order[: case.num_experts].int().to(DEVICE)


def check(case: Case, routing: Routing, post_norm: PostNorm = None) -> None:
    from freetoken.kernels import triton_on_demand

    groups = group_pairs(routing, case.num_experts, rows_of(case))
    args = (case.tokens(), routing, groups, ExpertMatrices.of(case.views(NUM_ROWS)), case.gate)
    expected = reference_experts.experts_on_demand(*args, post_norm)
    case.compare(triton_on_demand.experts_on_demand(*args, post_norm), expected)


@needs_triton
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize(
    ("num_tokens", "has_bias"),  # each kernel that these numbers choose, with and without
    [(1, False), (1, True), (3, True), (6, False)],
)
def test_kernels_equal_the_reference(name: str, num_tokens: int, has_bias: bool) -> None:
    gate = GATES[name]
    case = Case(num_tokens, has_bias=has_bias, gate=gate, is_gated=gate.is_gated)
    check(case, case.routing())


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_kernels_equal_the_reference_in_every_type(dtype: torch.dtype, num_tokens: int) -> None:
    case = Case(num_tokens, dtype=dtype, hidden=136, expert_hidden=40, has_bias=True)
    check(case, case.routing(low=-1))


@needs_triton
@pytest.mark.parametrize("num_tokens", [1, 4, 7])
@pytest.mark.parametrize("low", [0, -2])
def test_skipped_pairs_and_padding_give_nothing(num_tokens: int, low: int) -> None:
    case = Case(num_tokens, has_bias=True)
    routing = case.routing(low, num_tokens=num_tokens - 1)
    routing.weights[-1] = torch.nan  # a padding token's weights may be anything
    check(case, routing)


@needs_triton
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_gate_that_is_not_known_runs_between_the_kernels(num_tokens: int) -> None:
    def gate(product: torch.Tensor) -> torch.Tensor:
        first, second = product.chunk(2, dim=-1)
        return torch.cos(first) * second

    case = Case(num_tokens, gate=gate)
    check(case, case.routing(low=-1))


@needs_triton
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_post_norm_sees_each_expert_before_the_weights(num_tokens: int) -> None:
    case = Case(num_tokens, has_bias=True)
    check(case, case.routing(), lambda y: y / y.norm(dim=-1, keepdim=True).clamp(min=1e-3))


@needs_triton
def test_one_expert_may_have_all_tokens() -> None:
    case = Case(40, top_k=1)
    routing = case.routing()
    check(case, replace(routing, ids=torch.full_like(routing.ids, 3)))


@needs_triton
def test_a_step_of_padding_alone_gives_zeros() -> None:
    case = Case(2)
    check(case, case.routing(num_tokens=0))


@needs_triton
@pytest.mark.parametrize("stages", [1, 3] if DEVICE == "cuda" else [1])  # nothing interpreted
@pytest.mark.parametrize("method", ["gemv", "dot"])
@pytest.mark.parametrize("name", ["swiglu", "clamped"])
def test_every_method_computes_the_same_products(method: str, stages: int, name: str) -> None:
    from freetoken.kernels import triton_on_demand as kernels

    case = Case(6, has_bias=True, gate=GATES[name])
    routing = case.routing(low=-1)
    groups = group_pairs(routing, case.num_experts, rows_of(case))
    matrices = ExpertMatrices.of(case.views(NUM_ROWS))
    launch = Launch(method, 16, 16, stages, 4)  # type: ignore[arg-type]
    act = kernels.up_product(case.tokens(), routing, groups, matrices, GATES[name], launch)
    y = kernels.down_product(act, routing, groups, matrices, launch)
    got = kernels.combine(y, routing, case.num_experts)
    args = (case.tokens(), routing, groups, matrices, GATES[name])
    case.compare(got, reference_experts.experts_on_demand(*args))
    token = Launch("token", 16, 16, stages, 4)
    case.compare(kernels.token_down(act, routing, groups.rows, matrices, token), got)


def test_the_reference_is_the_definition() -> None:
    case = Case(4, has_bias=True, gate=GATES["clamped"])
    routing = case.routing(low=-1, num_tokens=3)
    hidden, views, rows = case.tokens(), case.views(NUM_ROWS), rows_of(case)
    expected = torch.zeros_like(hidden)
    for t in range(3):
        for k in range(case.top_k):
            expert = int(routing.ids[t, k])
            if not 0 <= expert < case.num_experts:
                continue
            row = int(rows[expert])
            product = views["up"][row] @ hidden[t] + views["up_bias"][row]
            gate = product[::2].clamp(max=0.7)
            up = product[1::2].clamp(-0.7, 0.7)
            act = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            y = views["down"][row] @ act + views["down_bias"][row]
            expected[t] += routing.weights[t, k] * y
    groups = group_pairs(routing, case.num_experts, rows)
    matrices = ExpertMatrices.of(views)
    got = reference_experts.experts_on_demand(hidden, routing, groups, matrices, case.gate)
    case.compare(got, expected)


def test_group_pairs_lists_kept_pairs_once_by_expert() -> None:
    ids = torch.tensor([[3, 0], [-1, 3], [7, 0], [0, 1]])
    routing = Routing(ids, torch.ones(4, 2), torch.tensor([3], dtype=torch.int32))
    groups = group_pairs(routing, 5)
    assert isinstance(groups, Groups)
    assert groups.active[: int(groups.num_active)].tolist() == [0, 3]
    assert groups.offsets.tolist() == [0, 2, 4, 4, 4, 4]
    assert groups.pairs[:4].tolist() == [1, 5, 0, 3]


def test_gate_kinds_are_gates() -> None:
    kind = GateKind("swish")
    product = torch.tensor([[1.0, -2.0, 3.0, 4.0]])
    expected = torch.nn.functional.silu(product[:, :2]) * product[:, 2:]
    torch.testing.assert_close(kind(product), expected)
