from __future__ import annotations

import weakref
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from freetoken.kernels.prepacked import can_prepack
from freetoken.model.layers import (
    FusedRMSNorm,
    PackedLinear,
    SiblingLinear,
    speed_up_for_cpu,
)

C = 64


class EpsilonOutside(nn.Module):
    """A norm that adds epsilon to the root instead of to the mean."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        root = x.float().pow(2).mean(-1, keepdim=True).sqrt()
        return (self.weight * (x.float() / (root + self.variance_epsilon))).to(x.dtype)


class Twice(Qwen3MoeRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def replace(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    parent = nn.ModuleDict({"child": module})
    speed_up_for_cpu(parent, dtype or next(module.parameters()).dtype)
    return parent["child"]


def random_norm(norm: Any, dtype: torch.dtype) -> nn.Module:
    module: nn.Module = norm(C)
    with torch.no_grad():
        module.weight.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
    return module.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [Qwen3MoeRMSNorm, GptOssRMSNorm])
@pytest.mark.parametrize("scale", [2.0**-24, 1.0, 100.0])
@torch.no_grad()
def test_rms_norm_is_fused_and_computes_the_same(
    norm: type[nn.Module], dtype: torch.dtype, scale: float
) -> None:
    plain = random_norm(norm, dtype)
    fused = replace(plain)
    assert isinstance(fused, FusedRMSNorm)
    x = torch.randn(2, 5, C, generator=torch.Generator().manual_seed(1)).to(dtype) * scale
    # Half precision: one rounding less than the module, of the product with the weight.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(fused(x), plain(x), rtol=tolerance, atol=0)


@torch.no_grad()
def test_fused_norm_is_linear_where_inputs_are_far_below_epsilon() -> None:
    # The demo model turns q/k norms into plain scaling in this way.
    plain = Qwen3MoeRMSNorm(C).to(torch.bfloat16)
    plain.weight.fill_(46592.0)
    fused = replace(plain)
    assert isinstance(fused, FusedRMSNorm)
    x = torch.randn(4, C, generator=torch.Generator().manual_seed(0)).bfloat16() * 2.0**-24
    expected = x.float() * 46592.0 / plain.variance_epsilon**0.5
    torch.testing.assert_close(fused(x).float(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("norm", [Gemma2RMSNorm, EpsilonOutside, Twice, nn.LayerNorm])
def test_other_norms_are_left_alone(norm: type[nn.Module]) -> None:
    plain = random_norm(norm, torch.float32)
    assert replace(plain) is plain


@pytest.mark.parametrize("has_bias", [False, True])
@torch.no_grad()
def test_linear_layers_of_bf16_are_packed(has_bias: bool) -> None:
    if not can_prepack(torch.bfloat16):
        pytest.skip("this CPU has no packed bf16")
    torch.manual_seed(0)
    plain = nn.Linear(C, 48, bias=has_bias).to(torch.bfloat16)
    packed = replace(plain)
    assert isinstance(packed, PackedLinear)
    for shape in ((1, 1, C), (1, 300, C), (7, C)):
        x = torch.randn(shape).bfloat16()
        torch.testing.assert_close(packed(x), plain(x), rtol=2**-7, atol=1e-2)
    assert packed(torch.empty(1, 0, C, dtype=torch.bfloat16)).shape == (1, 0, 48)


class Attention(nn.Module):
    """As many families write it: three layers read the same tensor."""

    def __init__(self, has_bias: bool = False, v_bias: bool | None = None) -> None:
        super().__init__()
        self.q_proj = nn.Linear(C, 48, bias=has_bias)
        self.k_proj = nn.Linear(C, 16, bias=has_bias)
        self.v_proj = nn.Linear(C, 24, bias=has_bias if v_bias is None else v_bias)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.q_proj(x), self.k_proj(x), self.v_proj(x)]


def sped_up_attention(**options: bool) -> tuple[Attention, Attention]:
    if not can_prepack(torch.bfloat16):
        pytest.skip("this CPU has no packed bf16")
    torch.manual_seed(0)
    plain = Attention(**options).bfloat16()
    fast = deepcopy(plain)
    speed_up_for_cpu(fast, torch.bfloat16)
    return plain, fast


def assert_same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("has_bias", [False, True])
@torch.no_grad()
def test_siblings_compute_what_they_computed_apart(has_bias: bool) -> None:
    plain, fast = sped_up_attention(has_bias=has_bias)
    assert isinstance(fast.q_proj, SiblingLinear)
    assert fast.q_proj.shared is fast.v_proj.shared
    for length in (1, 5, 1, 0):
        x = torch.randn(1, length, C).bfloat16()
        assert_same(fast(x), plain(x))


@torch.no_grad()
def test_siblings_called_with_different_tensors_or_in_any_order_are_right() -> None:
    plain, fast = sped_up_attention()
    x, y = torch.randn(2, 3, C).bfloat16()
    calls = [("q", x), ("k", y), ("v", x), ("q", x), ("q", x), ("v", y), ("k", x), ("v", x)]
    got = [getattr(fast, f"{name}_proj")(z) for name, z in calls]
    assert_same(got, [getattr(plain, f"{name}_proj")(z) for name, z in calls])


@torch.no_grad()
def test_siblings_keep_nothing_alive_once_all_have_been_called() -> None:
    _, fast = sped_up_attention()
    x = torch.randn(1, 3, C).bfloat16()
    alive = weakref.ref(x)
    fast(x)
    del x
    assert alive() is None


def test_layers_of_which_only_some_have_a_bias_stay_apart() -> None:
    _, fast = sped_up_attention(has_bias=True, v_bias=False)
    assert isinstance(fast.q_proj, PackedLinear)


def test_layers_kept_in_another_type_than_the_models_are_left_alone() -> None:
    for module in (nn.Linear(C, C).bfloat16(), random_norm(Qwen3MoeRMSNorm, torch.float32)):
        assert replace(module, torch.float16) is module


def test_linear_layers_of_fp32_and_of_other_classes_are_left_alone() -> None:
    class Special(nn.Linear):
        pass

    for module in (nn.Linear(C, C), Special(C, C).to(torch.bfloat16)):
        assert replace(module) is module
