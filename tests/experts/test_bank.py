from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from freetoken.experts.bank import ExpertBank, PackedBank, RowBank, allocate_rows, row_views
from freetoken.experts.layout import ALIGNMENT_BYTES, ExpertLayout
from freetoken.kernels.prepacked import can_prepack

C, FF, E = 24, 10, 3


def shapes(has_bias: bool) -> dict[str, tuple[int, ...]]:
    matrices = {"gate_up_proj": (2 * FF, C), "down_proj": (C, FF)}
    return matrices | ({"gate_up_proj_bias": (2 * FF,), "down_proj_bias": (C,)} if has_bias else {})


def fill(bank: ExpertBank) -> dict[tuple[int, str], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    filled = {}
    for expert in range(bank.num_experts):
        for tensor in bank.layout.tensors:
            value = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            bank.put(expert, tensor.name, value)
            filled[expert, tensor.name] = value
    return filled


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("form", "dtype"), [(RowBank, torch.float32), (RowBank, torch.bfloat16), (PackedBank, None)]
)
def test_bank_computes_each_expert_with_its_own_weights(
    form: type[RowBank] | type[PackedBank], dtype: torch.dtype | None, has_bias: bool
) -> None:
    if form is PackedBank and not can_prepack(torch.bfloat16):
        pytest.skip("this CPU has no packed bf16")
    dtype = dtype or torch.bfloat16
    bank = form(ExpertLayout.plan(shapes(has_bias), dtype), E)
    filled = fill(bank)
    x = torch.randn(4, C, generator=torch.Generator().manual_seed(1)).to(dtype)
    experts = [2, 0, 1]
    products = bank.linear("gate_up_proj", experts, [x, x[:1], x[1:]])
    for expert, got, tokens in zip(experts, products, [x, x[:1], x[1:]], strict=True):
        weight = filled[expert, "gate_up_proj"].float()
        bias = filled[expert, "gate_up_proj_bias"].float() if has_bias else None
        expected = F.linear(tokens.float(), weight, bias)
        # One rounding to bf16 is 2^-9 relative; the sums are of C terms of order one.
        torch.testing.assert_close(got.float(), expected, rtol=1e-2, atol=1e-2)


def test_rows_hold_exactly_what_was_put() -> None:
    bank = RowBank(ExpertLayout.plan(shapes(True), torch.bfloat16), E)
    filled = fill(bank)
    views = row_views(bank.layout, bank.rows.clone())
    for (expert, name), value in filled.items():
        assert torch.equal(views[name][expert], value)


def test_rows_are_aligned() -> None:
    rows = allocate_rows(3, 512, "cpu")
    assert rows.shape == (3, 512)
    assert rows.data_ptr() % ALIGNMENT_BYTES == 0
    assert rows.is_contiguous()


def test_bank_keeps_no_reference_to_what_was_put() -> None:
    bank = RowBank(ExpertLayout.plan(shapes(False), torch.float32), E)
    value = torch.ones(C, FF)
    bank.put(0, "down_proj", value)
    value.zero_()
    assert bank.linear("down_proj", [0], [torch.ones(1, FF)])[0].eq(FF).all()


def test_memory_of_a_bank_holds_its_matrices() -> None:
    layout = ExpertLayout.plan(shapes(False), torch.bfloat16)
    num_bytes = sum(tensor.num_bytes for tensor in layout.tensors)
    for form in (RowBank, PackedBank):
        if form is PackedBank and not can_prepack(torch.bfloat16):
            continue
        bank = form(layout, E)
        fill(bank)
        assert sum(piece.end - piece.start for piece in bank.memory()) >= E * num_bytes
