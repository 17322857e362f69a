"""Expert banks: all experts of one layer, host side, in one of two forms.

RowBank keeps rows as the layout says: what slots are filled from. PackedBank keeps each matrix in
the form that the CPU library computes from: for experts computed in place; it is the only copy.
The loader fills either through `put`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
import torch.nn.functional as F

from freetoken.experts.layout import ALIGNMENT_BYTES, ExpertLayout
from freetoken.kernels.hugepages import MemoryRange
from freetoken.kernels.prepacked import linear_packed, packed_memory, plain_memory, prepack


class ExpertBank(Protocol):
    """All experts of a layer."""

    layout: ExpertLayout
    num_experts: int

    def put(self, expert: int, name: str, tensor: torch.Tensor) -> None:
        """Copy one tensor of one expert into the bank; `tensor` has the layout's shape."""

    def linear(
        self, name: str, experts: Sequence[int], xs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The matrix `name` of each expert, with its bias if any, times its tokens.

        xs: for each expert [S, in] · returns for each [S, out].
        """

    def memory(self) -> list[MemoryRange]:
        """Where the matrices lie."""


def allocate_rows(num_rows: int, row_bytes: int, device: torch.device | str) -> torch.Tensor:
    """[num_rows, row_bytes] uint8 on `device`, 256-byte aligned, contents undefined."""
    flat = torch.empty(num_rows * row_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    skip = -flat.data_ptr() % ALIGNMENT_BYTES
    return flat[skip : skip + num_rows * row_bytes].view(num_rows, row_bytes)


def row_views(layout: ExpertLayout, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each tensor of the layout as a view [N, *shape] into rows [N, row_bytes] uint8."""
    views = {}
    for tensor in layout.tensors:
        end = tensor.offset_bytes + tensor.num_bytes
        part = rows[:, tensor.offset_bytes : end].view(tensor.dtype)
        views[tensor.name] = part.unflatten(1, list(tensor.shape))
    return views


class RowBank:
    """Rows [E, row_bytes] uint8 cpu in one contiguous buffer: `rows` if given, else its own.

    `is_pinned`: a GPU may read the rows where they are; whoever pins them says so.
    """

    def __init__(
        self, layout: ExpertLayout, num_experts: int, rows: torch.Tensor | None = None
    ) -> None:
        if rows is None:
            rows = allocate_rows(num_experts, layout.row_bytes, "cpu")
        assert rows.shape == (num_experts, layout.row_bytes)
        assert rows.is_contiguous()
        self.layout = layout
        self.num_experts = num_experts
        self.rows = rows
        self.is_pinned = False
        self._views = row_views(layout, self.rows)

    def put(self, expert: int, name: str, tensor: torch.Tensor) -> None:
        self._views[name][expert].copy_(tensor)

    def tensor(self, expert: int, name: str) -> torch.Tensor:
        """The tensor `name` of one expert, of the layout's shape: a view, contiguous."""
        return self._views[name][expert]

    def linear(
        self, name: str, experts: Sequence[int], xs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        weight = self._views[name]
        bias = self._views.get(f"{name}_bias")
        return [
            F.linear(x, weight[expert], None if bias is None else bias[expert])
            for expert, x in zip(experts, xs, strict=True)
        ]

    def memory(self) -> list[MemoryRange]:
        return [plain_memory(self.rows)]


class PackedBank:
    """Every matrix in the CPU library's own blocked form; biases as they are."""

    def __init__(self, layout: ExpertLayout, num_experts: int) -> None:
        self.layout = layout
        self.num_experts = num_experts
        self._tensors: dict[str, list[torch.Tensor | None]] = {
            tensor.name: [None] * num_experts for tensor in layout.tensors
        }

    def put(self, expert: int, name: str, tensor: torch.Tensor) -> None:
        dtype = self.layout.tensor(name).dtype
        if tensor.dim() == 2:
            self._tensors[name][expert] = prepack(tensor.to(dtype))
        else:
            self._tensors[name][expert] = tensor.to(dtype, copy=True)

    def linear(
        self, name: str, experts: Sequence[int], xs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        weights = cast(list[torch.Tensor], self._tensors[name])
        biases = self._tensors.get(f"{name}_bias")
        return [
            linear_packed(x, weights[expert], None if biases is None else biases[expert])
            for expert, x in zip(experts, xs, strict=True)
        ]

    def memory(self) -> list[MemoryRange]:
        return [
            packed_memory(weight)
            for tensor in self.layout.tensors
            if len(tensor.shape) == 2
            for weight in self._tensors[tensor.name]
            if weight is not None
        ]
