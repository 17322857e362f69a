"""The packed inputs of a step: places, types, padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freetoken.worker.inputs import FROM_ROW, InputLayout, fill
from freetoken.worker.rows import Part, Work
from freetoken.worker.sampler import DrawArrays

NOBODY = 9


def make_draws(count):
    return DrawArrays(
        np.arange(1, count + 1, dtype=np.float32),
        np.arange(1, count + 1, dtype=np.int32),
        np.full(count, 0.5, np.float32),
        np.full(count, 0.25, np.float32),
        np.linspace(0, 0.9, count),
    )


def filled(work, num_tokens, num_samples):
    """The arrays as the device sees them, in a buffer with old contents."""
    layout = InputLayout(num_tokens, num_samples)
    buffer = np.full(layout.num_bytes, 0xAB, np.uint8)
    rows = work.sampled_rows()
    fill(layout.view_host(buffer), work, rows, make_draws(len(rows)), padding_row=NOBODY)
    return layout.view_device(torch.from_numpy(buffer))


def part(row, cached, ids, is_last=True):
    return Part(row, cached, np.array(ids, np.int32), is_last)


def rows(*ids):
    return np.array(ids, np.int64)


def test_extends_come_first_and_decode_rows_take_their_last_token():
    work = Work((part(3, 4, [7, 8, 9]), part(1, 0, [5], False)), rows(0, 2), rows(11, 12))
    inputs = filled(work, 6, 4)
    assert inputs.num_tokens.tolist() == [6]
    assert inputs.given.tolist() == [7, 8, 9, 5, FROM_ROW, FROM_ROW]
    assert inputs.rows.tolist() == [3, 3, 3, 1, 0, 2]
    assert inputs.positions.tolist() == [4, 5, 6, 0, 11, 12]
    assert inputs.logits_at.tolist()[:3] == [2, 4, 5]
    assert inputs.sampled_rows.tolist()[:3] == [3, 0, 2]
    assert inputs.temperature.tolist()[:3] == [1, 2, 3]
    assert inputs.top_k.tolist()[:3] == [1, 2, 3]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5])
def test_padding_overwrites_whatever_was_there(num_tokens):
    work = Work((), rows(*range(num_tokens)), rows(*range(num_tokens)))
    inputs = filled(work, 8, 7)
    for array in (inputs.given, inputs.rows, inputs.positions):
        assert not array[num_tokens:].any()
    assert (inputs.sampled_rows[num_tokens:] == NOBODY).all()
    assert (inputs.top_p[num_tokens:] == 1).all()
    for array in (inputs.logits_at, inputs.temperature, inputs.top_k, inputs.min_p):
        assert not array[num_tokens:].any()
    assert not inputs.uniforms[num_tokens:].any()


def test_arrays_do_not_overlap_and_have_the_types_of_the_kernels():
    layout = InputLayout(3, 2)
    buffer = np.zeros(layout.num_bytes, np.uint8)
    host, device = layout.view_host(buffer), layout.view_device(torch.from_numpy(buffer))
    total = 0
    for name in device.__dataclass_fields__:
        array, tensor = getattr(host, name), getattr(device, name)
        assert not tensor.any()
        array[:] = 1
        assert (tensor == 1).all(), name
        assert tensor.data_ptr() % tensor.itemsize == 0
        total += tensor.nbytes
    assert total <= layout.num_bytes
    dtypes = [device.top_k.dtype, device.temperature.dtype, device.uniforms.dtype]
    assert dtypes == [torch.int32, torch.float32, torch.float64]
