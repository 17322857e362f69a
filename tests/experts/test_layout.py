from __future__ import annotations

import json

import pytest
import torch

from freetoken.experts.layout import ALIGNMENT_BYTES, ExpertLayout

SHAPES = {
    "gate_up_proj": (6, 5),
    "down_proj": (5, 3),
    "gate_up_proj_bias": (6,),
    "down_proj_bias": (5,),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_are_aligned_in_order_and_do_not_overlap(dtype: torch.dtype) -> None:
    layout = ExpertLayout.plan(SHAPES, dtype)
    end = 0
    for tensor, (name, shape) in zip(layout.tensors, SHAPES.items(), strict=True):
        assert (tensor.name, tensor.shape, tensor.dtype) == (name, shape, dtype)
        assert tensor.offset_bytes % ALIGNMENT_BYTES == 0
        assert tensor.offset_bytes >= end
        end = tensor.offset_bytes + tensor.num_bytes
    assert layout.row_bytes % ALIGNMENT_BYTES == 0
    assert end <= layout.row_bytes < end + ALIGNMENT_BYTES


def test_layout_names_its_two_products() -> None:
    gated = ExpertLayout.plan(SHAPES, torch.float32)
    plain = ExpertLayout.plan({"up_proj": (3, 5), "down_proj": (5, 3)}, torch.float32)
    assert (gated.up, gated.down, gated.has_bias) == ("gate_up_proj", "down_proj", True)
    assert (plain.up, plain.down, plain.has_bias) == ("up_proj", "down_proj", False)


def test_layouts_that_differ_differ_as_data() -> None:
    layouts = [
        ExpertLayout.plan(SHAPES, torch.bfloat16),
        ExpertLayout.plan(SHAPES, torch.float16),
        ExpertLayout.plan(SHAPES | {"down_proj": (5, 4)}, torch.bfloat16),
        ExpertLayout.plan(dict(list(SHAPES.items())[:2]), torch.bfloat16),
    ]
    texts = [json.dumps(layout.to_data()) for layout in layouts]
    assert len(set(texts)) == len(texts)
    assert texts[0] == json.dumps(ExpertLayout.plan(SHAPES, torch.bfloat16).to_data())
