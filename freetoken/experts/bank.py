"""Expert banks: all experts of one layer, host side, in one of two forms.

RowBank keeps rows as the layout says: what slots are filled from. PackedBank keeps each matrix in
the form that the CPU library computes from: for experts computed in place; it is the only copy.
The loader fills either through `put`.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from freetoken.experts.layout import ALIGNMENT_BYTES, ExpertLayout
from freetoken.kernels.prepacked import linear_packed, prepack


class ExpertBank(Protocol):
    """All experts of a layer."""

    layout: ExpertLayout
    num_experts: int

    def put(self, expert: int, name: str, tensor: torch.Tensor) -> None:
        """Copy one tensor of one expert into the bank; `tensor` has the layout's shape."""

    def linear(self, expert: int, name: str, x: torch.Tensor) -> torch.Tensor:
        """x: [S, in] → [S, out], through the matrix `name` of `expert` and its bias if any."""


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
    """Rows [E, row_bytes] in one contiguous buffer."""

    def __init__(self, layout: ExpertLayout, num_experts: int) -> None:
        self.layout = layout
        self.num_experts = num_experts
        self.rows = allocate_rows(num_experts, layout.row_bytes, "cpu")
        self._views = row_views(layout, self.rows)

    def put(self, expert: int, name: str, tensor: torch.Tensor) -> None:
        self._views[name][expert].copy_(tensor)

    def linear(self, expert: int, name: str, x: torch.Tensor) -> torch.Tensor:
        bias = self._views[f"{name}_bias"][expert] if self.layout.has_bias else None
        return F.linear(x, self._views[name][expert], bias)


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

    def linear(self, expert: int, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = self._tensors[name][expert]
        assert weight is not None, f"{name} of expert {expert} was never loaded"
        bias = self._tensors[f"{name}_bias"][expert] if self.layout.has_bias else None
        return linear_packed(x, weight, bias)
