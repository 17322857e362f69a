"""Gates of transformers' experts modules are recognised by trial, and only if they are the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from freetoken.kernels.gates import GateKind, recognise_gate

WIDTH = 24
Fn = Callable[[torch.Tensor], torch.Tensor]


def gated(act: Fn) -> Fn:
    def gate(product: torch.Tensor) -> torch.Tensor:
        first, second = product.chunk(2, dim=-1)
        return act(first) * second

    return gate


def clamped_swiglu(interleaved: bool, alpha: float, limit: float, shift: float) -> Fn:
    """gpt_oss (interleaved), minimax_m3 and openai_privacy_filter; shift 0: deepseek_v4, hy_v4."""

    def gate(product: torch.Tensor) -> torch.Tensor:
        if interleaved:
            first, second = product[..., ::2], product[..., 1::2]
        else:
            first, second = product.chunk(2, dim=-1)
        first = first.clamp(max=limit)
        second = second.clamp(-limit, limit)
        return (second + shift) * (first * torch.sigmoid(first * alpha))

    return gate


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "activation", "alpha"),
    [
        ("silu", "swish", 1.0),
        ("swish", "swish", 1.0),
        ("quick_gelu", "swish", 1.702),
        ("gelu", "gelu", 1.0),
        ("gelu_python", "gelu", 1.0),
        ("gelu_new", "gelu_tanh", 1.0),
        ("gelu_fast", "gelu_tanh", 1.0),
        ("gelu_pytorch_tanh", "gelu_tanh", 1.0),
        ("relu", "relu", 1.0),
        ("relu2", "relu2", 1.0),
        ("sigmoid", "sigmoid", 1.0),
        ("tanh", "tanh", 1.0),
        ("linear", "identity", 1.0),
    ],
)
def test_activations_are_recognised(
    name: str, activation: str, alpha: float, dtype: torch.dtype
) -> None:
    act = ACT2FN[name]
    assert recognise_gate(gated(act), True, WIDTH, dtype) == GateKind(activation, alpha=alpha)
    ungated = GateKind(activation, is_gated=False, alpha=alpha)
    assert recognise_gate(act, False, WIDTH, dtype) == ungated


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("alpha", "limit", "shift"), [(1.702, 7.0, 1.0), (1.0, 10.0, 0.0), (1.0, 7.0, 0.0)]
)
def test_clamped_gates_are_recognised(
    dtype: torch.dtype, interleaved: bool, alpha: float, limit: float, shift: float
) -> None:
    gate = clamped_swiglu(interleaved, alpha, limit, shift)
    expected = GateKind("swish", interleaved=interleaved, alpha=alpha, limit=limit, up_shift=shift)
    assert recognise_gate(gate, True, WIDTH, dtype) == expected


def test_a_gate_that_computes_in_fp32_is_recognised() -> None:
    def gate(product: torch.Tensor) -> torch.Tensor:
        first, second = product.chunk(2, dim=-1)
        return (F.silu(first.float()) * second.float()).to(product.dtype)

    assert recognise_gate(gate, True, WIDTH, torch.bfloat16) == GateKind("swish")


@pytest.mark.parametrize("name", ["mish", "hardswish", "leaky_relu", "relu6", "gelu_10"])
def test_other_activations_are_not_taken_for_known_ones(name: str) -> None:
    assert recognise_gate(gated(ACT2FN[name]), True, WIDTH, torch.float32) is None


@pytest.mark.parametrize(
    "gate",
    [
        lambda x: x[..., WIDTH // 2 :] * F.silu(x[..., : WIDTH // 2]).clamp(max=2.0),  # step3p7
        lambda x: F.silu(x[..., WIDTH // 2 :]) * x[..., : WIDTH // 2],  # halves exchanged
        lambda x: F.silu(x[..., : WIDTH // 2].flip(-1)) * x[..., WIDTH // 2 :],
        lambda x: torch.softmax(x[..., : WIDTH // 2], -1) * x[..., WIDTH // 2 :],
        lambda x: x[..., :WIDTH] / 0,
        lambda x: x @ torch.ones(3, 3),
    ],
)
def test_functions_of_another_form_are_refused(gate: Fn) -> None:
    assert recognise_gate(gate, True, WIDTH, torch.float32) is None


def test_a_kind_computes_in_the_type_it_is_given() -> None:
    product = torch.tensor([[1.0, -2.0, 3.0, 4.0]], dtype=torch.bfloat16)
    got = GateKind("swish")(product)
    assert got.dtype == torch.bfloat16
    expected = F.silu(product[:, :2].float()) * product[:, 2:].float()
    torch.testing.assert_close(got, expected.bfloat16())


def test_gpt_oss_own_gate_is_recognised() -> None:
    config = GptOssConfig(hidden_size=8, intermediate_size=12, num_local_experts=2)
    with torch.device("meta"):
        module = GptOssExperts(config)
    got = recognise_gate(module._apply_gate, True, 24, torch.bfloat16)
    assert got == GateKind("swish", interleaved=True, alpha=1.702, limit=7.0, up_shift=1.0)
