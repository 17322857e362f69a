from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from freetoken.kernels import linear_ops
from freetoken.model import ops
from freetoken.model.graph_passes import (
    LayerPasses,
    merge_repeated,
    replace_narrow_linears,
    replace_topk,
)
from freetoken.model.joint import JointLinear, join_linears

aten = torch.ops.aten


def trace(function: object, *inputs: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)  # type: ignore[arg-type]


def count(graph: fx.Graph, target: object) -> int:
    return sum(node.target is target for node in graph.nodes)


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_joined_layers_become_one(has_bias: bool) -> None:
    inputs = [torch.randn(1, 5, 6), torch.randn(12, 6)]
    if has_bias:
        inputs.append(torch.randn(12))

    def layer(x: torch.Tensor, *weight_and_bias: torch.Tensor) -> list[torch.Tensor]:
        return [F.linear(x, *weight_and_bias)[..., lo : lo + 4] for lo in (0, 4, 8)]

    traced = trace(layer, *inputs)
    product = aten.addmm.default if has_bias else aten.mm.default
    assert count(traced.graph, product) == 3
    merge_repeated(traced.graph)
    traced.recompile()
    assert count(traced.graph, product) == 1
    for got, expected in zip(traced(*inputs), layer(*inputs), strict=True):
        assert torch.equal(got, expected)


def test_different_products_stay() -> None:
    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight) + F.linear(x + 1, weight)

    traced = trace(layer, torch.randn(5, 6), torch.randn(6, 6))
    merge_repeated(traced.graph)
    assert count(traced.graph, aten.mm.default) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routers_choice_becomes_our_operator(dtype: torch.dtype) -> None:
    scores = torch.stack([torch.randperm(32) for _ in range(5)]).to(dtype) / 32

    def route(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = torch.topk(scores, 4, dim=-1)
        return values / values.sum(-1, keepdim=True), ids

    traced = trace(route, scores)
    replace_topk(traced.graph)
    traced.recompile()
    assert count(traced.graph, torch.ops.freetoken.top_k.default) == 1
    assert count(traced.graph, aten.topk.default) == 0
    for got, expected in zip(traced(scores), route(scores), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "options", [{"dim": 0}, {"dim": -1, "largest": False}, {"dim": -1, "k": 65}]
)
def test_other_choices_stay(options: dict[str, int]) -> None:
    k = options.pop("k", 2)
    traced = trace(lambda x: torch.topk(x, k, **options), torch.rand(70, 70))
    replace_topk(traced.graph)
    assert count(traced.graph, aten.topk.default) == 1


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "width", "ours"), [(5, 1024, True), (5, 1025, False), (1, 8, True)]
)
def test_narrow_linear_layers_become_our_operator(
    num_tokens: int, width: int, ours: bool, has_bias: bool
) -> None:
    inputs = [torch.randn(1, num_tokens, 6), torch.randn(width, 6)]
    if has_bias:
        inputs.append(torch.randn(width))
    traced = trace(F.linear, *inputs)
    replace_narrow_linears(traced.graph)
    traced.recompile()
    assert count(traced.graph, torch.ops.freetoken.narrow_linear.default) == ours
    torch.testing.assert_close(traced(*inputs), F.linear(*inputs))


def test_other_products_stay() -> None:
    def products(x: torch.Tensor, square: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
        return [
            x @ square,
            torch.addmm(bias, x, square.T, beta=2),  # a scaled bias
            torch.addmm(bias[:, None], x, square.T),  # of another shape
            F.linear(x, square.T.contiguous().T),  # columns that lie together
        ]

    inputs = torch.randn(6, 6), torch.randn(6, 6), torch.randn(6)
    traced = trace(products, *inputs)
    replace_narrow_linears(traced.graph)
    assert count(traced.graph, torch.ops.freetoken.narrow_linear.default) == 0


def test_passes_are_equal_and_known_to_the_cache() -> None:
    assert LayerPasses() == LayerPasses()
    assert LayerPasses().uuid() == LayerPasses().uuid() is not None


@pytest.mark.parametrize("module", [ops, linear_ops])
def test_the_cache_knows_what_operators_take(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = LayerPasses().uuid()
    changed = tmp_path / "changed.py"
    changed.write_text("MAX_OUTPUTS = 8\n")
    monkeypatch.setattr(module, "__file__", str(changed))
    assert LayerPasses().uuid() != before


@pytest.mark.parametrize("has_bias", [False, True])
@torch.no_grad()
def test_joined_layers_compute_what_they_did(has_bias: bool) -> None:
    torch.manual_seed(0)
    sizes = {"q_proj": 12, "k_proj": 4, "v_proj": 4}
    parent = nn.ModuleDict(
        {name: nn.Linear(8, size, bias=has_bias) for name, size in sizes.items()}
    )
    parent["gate_proj"] = nn.Linear(8, 4)
    x = torch.randn(3, 8)
    expected = {name: layer(x) for name, layer in parent.items()}
    join_linears(parent)
    for name, layer in parent.items():
        assert isinstance(layer, JointLinear) == (name in sizes)
        assert torch.equal(layer(x), expected[name])
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected[name])
    assert sum(p.numel() for p in parent.parameters()) == 8 * 24 + 4 + 20 * has_bias


@torch.no_grad()
def test_layers_that_do_not_match_are_not_joined() -> None:
    parent = nn.ModuleDict({"gate_proj": nn.Linear(8, 4), "up_proj": nn.Linear(6, 4)})
    join_linears(parent)
    assert all(type(layer) is nn.Linear for layer in parent.values())


@pytest.mark.parametrize("k", [1, 2, 32])
def test_operator_gives_what_its_compiled_callers_expect(k: int) -> None:
    scores = torch.rand(5, 32)
    torch.library.opcheck(torch.ops.freetoken.top_k.default, (scores, k))


@pytest.mark.parametrize("has_bias", [False, True])
def test_narrow_operator_gives_what_its_compiled_callers_expect(has_bias: bool) -> None:
    bias = torch.rand(4) if has_bias else None
    arguments = torch.rand(5, 6), torch.rand(4, 6), bias
    torch.library.opcheck(torch.ops.freetoken.narrow_linear.default, arguments)
