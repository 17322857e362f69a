"""Linear layers of few tokens and outputs against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from freetoken.kernels.linear_ops import narrow_linear

TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2},
}


def make(num_tokens, num_outputs, size, has_bias, dtype, device):
    generator = torch.Generator().manual_seed(num_tokens)

    def rand(*shape):
        # Views of wider tensors.
        return torch.randn(*shape[:-1], shape[-1] + 3, generator=generator).to(device, dtype)

    x, weight = rand(num_tokens, size)[:, 2:-1], rand(num_outputs, size)[:, 3:] / size**0.5
    return x, weight, rand(num_outputs - 3) if has_bias else None


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 16])
@pytest.mark.parametrize(("num_outputs", "size"), [(1, 8), (33, 1024), (8, 2880), (70, 100)])
def test_it_is_torchs_product(num_tokens, num_outputs, size, has_bias, kernel_dtype, device):
    from freetoken.kernels import triton_linear as subject

    tensors = make(num_tokens, max(4, num_outputs), size, has_bias, kernel_dtype, device)
    expected = F.linear(*(None if t is None else t.double() for t in tensors))
    got = subject.narrow_linear(*tensors)
    assert got.dtype == kernel_dtype
    torch.testing.assert_close(got.double(), expected, **TOLERANCES[kernel_dtype])


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_any_number_of_tokens_is_multiplied(num_tokens, device):
    tensors = make(num_tokens, 12, 16, True, torch.float32, device)
    torch.testing.assert_close(
        narrow_linear(*tensors), F.linear(*tensors), **TOLERANCES[torch.float32]
    )


def test_any_strides_are_multiplied(kernel_dtype, device):
    """In a compiled layer inductor chooses those of the tokens, whatever the graph says."""
    from freetoken.kernels import triton_linear as subject

    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(24, 5, generator=generator).to(device, kernel_dtype).T,
        torch.randn(24, 6, generator=generator).to(device, kernel_dtype).T,
        torch.ones(1, device=device, dtype=kernel_dtype).expand(6),
    ]
    expected = F.linear(*(tensor.double() for tensor in tensors))
    got = subject.narrow_linear(*tensors)
    torch.testing.assert_close(got.double(), expected, **TOLERANCES[kernel_dtype])
