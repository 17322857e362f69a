from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from freetoken.kernels.prepacked import can_prepack, linear_packed, prepack


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 40), (5, 40), (2, 3, 40), (600, 40)])
def test_packed_linear_equals_the_plain_one(
    dtype: torch.dtype, has_bias: bool, shape: tuple[int, ...]
) -> None:
    if not can_prepack(dtype):
        pytest.skip(f"this CPU has no packed {dtype}")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(72, 40, generator=generator).to(dtype)
    bias = torch.randn(72, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(shape, generator=generator).to(dtype)
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    got = linear_packed(x, prepack(weight), bias)
    assert got.dtype == dtype
    # The result is rounded once: 2^-9 relative in bf16, less in fp16.
    torch.testing.assert_close(got.float(), expected, rtol=1e-2, atol=2e-2)


def test_fp32_is_left_to_the_plain_operator() -> None:
    assert not can_prepack(torch.float32)


def test_packing_copies_the_weight() -> None:
    if not can_prepack(torch.bfloat16):
        pytest.skip("this CPU has no packed bf16")
    weight = torch.ones(8, 8, dtype=torch.bfloat16)
    packed = prepack(weight)
    weight.zero_()
    assert linear_packed(torch.ones(1, 8, dtype=torch.bfloat16), packed).eq(8).all()
