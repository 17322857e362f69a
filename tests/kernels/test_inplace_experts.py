"""Experts in place against the definition, one token and one expert at a time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.nn import functional as F

from freetoken.kernels import inplace_experts
from freetoken.kernels.inplace_experts import group_by_expert, routed_experts
from freetoken.kernels.ops import PostNorm

C, FF, N = 12, 6, 5


def make_views(has_bias: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(N, *shape, generator=generator, dtype=torch.float64)

    views = {"gate_up_proj": rand(2 * FF, C), "down_proj": rand(C, FF)}
    if has_bias:
        views |= {"gate_up_proj_bias": rand(2 * FF), "down_proj_bias": rand(C)}
    return views


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def compute(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    views: dict[str, torch.Tensor],
    post_norm: PostNorm = None,
) -> torch.Tensor:
    def linear(name: str, experts: Sequence[int], xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        bias = views.get(f"{name}_bias")
        return [
            F.linear(x, views[name][expert], None if bias is None else bias[expert])
            for expert, x in zip(experts, xs, strict=True)
        ]

    return routed_experts(
        hidden, ids, weights, linear, "gate_up_proj", "down_proj", N, swiglu, post_norm
    )


def naive(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    views: dict[str, torch.Tensor],
    halve: bool,
) -> torch.Tensor:
    out = torch.zeros_like(hidden)
    for t in range(ids.shape[0]):
        for k in range(ids.shape[1]):
            row = int(ids[t, k])
            if not 0 <= row < N:
                continue
            x = views["gate_up_proj"][row] @ hidden[t]
            x = x + (views["gate_up_proj_bias"][row] if "gate_up_proj_bias" in views else 0)
            x = views["down_proj"][row] @ swiglu(x)
            x = x + (views["down_proj_bias"][row] if "down_proj_bias" in views else 0)
            out[t] += weights[t, k] * (x / 2 if halve else x)
    return out


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("halve", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 9])
@pytest.mark.parametrize("low", [0, -1, -N])
def test_experts_in_place_equal_the_definition(
    has_bias: bool, halve: bool, num_tokens: int, low: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    views = make_views(has_bias)
    hidden = torch.randn(num_tokens, C, generator=generator, dtype=torch.float64)
    weights = torch.rand(num_tokens, 3, generator=generator, dtype=torch.float64)
    # Of N rows and, with low < 0, of ids on both sides that must be skipped.
    ids = torch.randint(low, N - low, (num_tokens, 3), generator=generator)
    norm = (lambda x: x / 2) if halve else None
    got = compute(hidden, ids, weights, views, norm)
    torch.testing.assert_close(got, naive(hidden, ids, weights, views, halve))


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_tokens_without_any_expert_give_zero(num_tokens: int) -> None:
    hidden = torch.ones(num_tokens, C, dtype=torch.float64)
    ids = torch.tensor([[-1, N]] * num_tokens)
    got = compute(hidden, ids, torch.ones(num_tokens, 2), make_views(False))
    assert got.eq(0).all()
    assert got.shape == hidden.shape


def test_group_by_expert_lists_every_kept_pair_once() -> None:
    pairs = group_by_expert(torch.tensor([[3, 0], [-1, 3], [7, 0]]), 5)
    assert pairs.experts == [0, 3]
    assert pairs.sizes == [2, 2]
    assert pairs.tokens.tolist() == [0, 2, 0, 1]
    assert pairs.places.tolist() == [2, 0, 3, 1]
    assert pairs.offsets.tolist() == [0, 2, 3]
    assert pairs.kept is not None
    assert pairs.kept.tolist() == [0, 1, 3, 5]


@pytest.mark.parametrize("low", [0, -1])
def test_group_by_expert_is_the_same_for_few_and_for_many_pairs(
    low: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(low, 8 - low, (500, 4), generator=torch.Generator().manual_seed(0))
    many = group_by_expert(ids, 8)
    monkeypatch.setattr(inplace_experts, "FEW_PAIRS", ids.numel())
    few = group_by_expert(ids, 8)
    assert few.experts == many.experts == list(range(8))
    assert few.sizes == many.sizes
    for field in ("tokens", "places", "offsets"):
        assert torch.equal(getattr(few, field), getattr(many, field))
    if low == 0:
        assert few.kept is None
        assert many.kept is None
    else:
        assert few.kept is not None
        assert many.kept is not None
        assert torch.equal(few.kept, many.kept)


def test_weights_of_another_type_do_not_change_the_type_of_the_result() -> None:
    hidden = torch.ones(3, C, dtype=torch.bfloat16)
    views = {name: view.bfloat16() for name, view in make_views(False).items()}
    weights = torch.ones(3, 2, dtype=torch.float32)
    got = compute(hidden, torch.tensor([[0, 1]] * 3), weights, views)
    assert got.dtype == torch.bfloat16
