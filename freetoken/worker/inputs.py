"""What a step on the device is told: arrays of fixed places in one buffer, copied at once.

A step of T tokens of which n are sampled is written to a pinned buffer on the host; one copy brings
it to the device, whatever the step is. Steps with fewer tokens or rows than their bucket are padded
with values that do no harm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freetoken.worker.rows import Ids, Work
from freetoken.worker.sampler import DrawArrays

ALIGNMENT = 16
FROM_ROW = -1
"""As a given id: the token is the one sampled last for its row."""

_A = TypeVar("_A")

_PER_TOKEN = {"given": "int64", "rows": "int64", "positions": "int64"}
_PER_SAMPLE = {
    "logits_at": "int64",
    "sampled_rows": "int64",
    "uniforms": "float64",
    "temperature": "float32",
    "top_k": "int32",
    "top_p": "float32",
    "min_p": "float32",
}


@dataclass(frozen=True, slots=True)
class Inputs(Generic[_A]):
    """Views into one buffer, as numpy arrays or tensors.

    num_tokens: [1] int32, tokens that are no padding · given, rows, positions: [T] int64 ·
    logits_at: [n] int64 places of the sampled tokens · sampled_rows: [n] int64 ·
    uniforms: [n] f64 · temperature, top_p, min_p: [n] f32 · top_k: [n] int32.
    """

    num_tokens: _A
    given: _A
    rows: _A
    positions: _A
    logits_at: _A
    sampled_rows: _A
    uniforms: _A
    temperature: _A
    top_k: _A
    top_p: _A
    min_p: _A


HostInputs = Inputs[npt.NDArray[Any]]
DeviceInputs = Inputs[Tensor]


@dataclass(frozen=True, slots=True)
class InputLayout:
    """Where the arrays of T = `num_tokens` and n = `num_samples` lie in a buffer of bytes."""

    num_tokens: int
    num_samples: int

    @property
    def num_bytes(self) -> int:
        return self._places()[1]

    def view_host(self, buffer: npt.NDArray[np.uint8]) -> HostInputs:
        return self._view(lambda start, end, dtype: buffer[start:end].view(dtype))

    def view_device(self, buffer: Tensor) -> DeviceInputs:
        return self._view(lambda start, end, dtype: buffer[start:end].view(getattr(torch, dtype)))

    def _view(self, cut: Callable[[int, int, str], Any]) -> Inputs[Any]:
        places, _ = self._places()
        return Inputs(**{name: cut(*place) for name, place in places.items()})

    def _places(self) -> tuple[dict[str, tuple[int, int, str]], int]:
        sizes = {"num_tokens": ("int32", 1)}
        sizes |= {name: (dtype, self.num_tokens) for name, dtype in _PER_TOKEN.items()}
        sizes |= {name: (dtype, self.num_samples) for name, dtype in _PER_SAMPLE.items()}
        places, start = {}, 0
        for name, (dtype, count) in sizes.items():
            end = start + np.dtype(dtype).itemsize * count
            places[name] = (start, end, dtype)
            start = -(-end // ALIGNMENT) * ALIGNMENT
        return places, start


def fill(
    inputs: HostInputs, work: Work, row_ids: Ids, draws: DrawArrays, *, padding_row: int
) -> None:
    """Write a step: first the extends, then the decode rows.

    row_ids: [n] the sampled rows · padding_row: where tokens sampled for nobody go.
    """
    num_extend = _fill_extends(inputs, work)
    end = num_extend + len(work.decode_rows)
    inputs.num_tokens[0] = end
    inputs.given[num_extend:end] = FROM_ROW
    inputs.rows[num_extend:end] = work.decode_rows
    inputs.positions[num_extend:end] = work.decode_positions
    for array in (inputs.given, inputs.rows, inputs.positions):
        array[end:] = 0
    count = len(row_ids)
    num_decode = len(work.decode_rows)
    inputs.logits_at[count - num_decode : count] = np.arange(num_extend, end)
    inputs.sampled_rows[:count] = row_ids
    inputs.temperature[:count] = draws.temperature
    inputs.top_k[:count] = draws.top_k
    inputs.top_p[:count] = draws.top_p
    inputs.min_p[:count] = draws.min_p
    inputs.uniforms[:count] = draws.uniforms
    inputs.sampled_rows[count:] = padding_row
    inputs.top_p[count:] = 1
    for array in (
        inputs.logits_at,
        inputs.temperature,
        inputs.top_k,
        inputs.min_p,
        inputs.uniforms,
    ):
        array[count:] = 0


def _fill_extends(inputs: HostInputs, work: Work) -> int:
    """The number of extend tokens."""
    start = num_last = 0
    for part in work.extends:
        end = start + len(part.token_ids)
        inputs.given[start:end] = part.token_ids
        inputs.rows[start:end] = part.row_id
        inputs.positions[start:end] = np.arange(part.cached_len, part.cached_len + end - start)
        if part.is_last:
            inputs.logits_at[num_last] = end - 1
            num_last += 1
        start = end
    return start
