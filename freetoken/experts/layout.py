"""What one expert's row of bytes holds: data that banks, slots and kernels share.

A row is the tensors of one expert in the order kernels read them, each at a 256-byte aligned
offset, the row padded to 256 bytes. Matrices are stored [out, in] whatever the checkpoint does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

ALIGNMENT_BYTES = 256
LAYOUT_VERSION = 1


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One tensor of an expert at `[offset_bytes, offset_bytes + num_bytes)` of its row."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The row of one expert.

    `up` and `down` name the two products: `gate_up_proj` [2F, C] when the experts have a gate
    (concatenated or interleaved, the gate function knows), else `up_proj` [F, C]; `down_proj`
    [C, F]. Biases follow the matrices.
    """

    tensors: tuple[ExpertTensor, ...]
    row_bytes: int

    @property
    def up(self) -> str:
        return self.tensors[0].name

    @property
    def down(self) -> str:
        return self.tensors[1].name

    @property
    def has_bias(self) -> bool:
        return len(self.tensors) == 4

    def tensor(self, name: str) -> ExpertTensor:
        """The tensor called `name`; KeyError otherwise."""
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        raise KeyError(name)

    def to_data(self) -> dict[str, object]:
        """Plain data (str, int, list), for files and other processes."""
        return {
            "version": LAYOUT_VERSION,
            "row_bytes": self.row_bytes,
            "tensors": [
                [t.name, list(t.shape), str(t.dtype).removeprefix("torch."), t.offset_bytes]
                for t in self.tensors
            ],
        }

    @classmethod
    def plan(cls, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> ExpertLayout:
        """Lay out tensors of `dtype` in the order given: up, down, up bias, down bias."""
        assert len(shapes) in (2, 4), "up and down, with both biases or none"
        tensors = []
        offset = 0
        for name, shape in shapes.items():
            tensor = ExpertTensor(name, tuple(shape), dtype, offset)
            tensors.append(tensor)
            offset = _align(offset + tensor.num_bytes)
        return cls(tuple(tensors), offset)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
