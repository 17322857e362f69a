"""Whether a bank's rows can be read straight from the file: no copy, no memory in between.

Most checkpoints store experts as the banks want them, but for where the parts go: gate and up one
after the other, or all experts in one tensor. transformers' converters say so only in code, so the
converter is tried on a small copy of the sources whose every element is different; what comes out
as whole sources, one after the other, is a Placement. The loader compares the first row of each
kind that it reads so with the converter's own result.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from transformers import PreTrainedModel

from freetoken.errors import ConfigError
from freetoken.model.checkpoint import FLOAT_DTYPES, StoredTensor
from freetoken.model.conversion import Task, convert

SMALL = (6, 4, 2)
"""The most elements in the dimensions of the small copy: even, since gates are often split in two,
and no two alike, so that a transposition shows."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A row's tensor is the task's sources end to end, in this order of their places among all."""

    order: tuple[int, ...]

    def sources(self, task: Task) -> list[StoredTensor]:
        sources = flat_sources(task)
        return [sources[index] for index in self.order]


def flat_sources(task: Task) -> list[StoredTensor]:
    """All of them, pattern by pattern."""
    return [stored for group in task.sources.values() for stored in group]


def find_placement(
    task: Task, model: PreTrainedModel, *, transposed: bool, stacked: bool, dtype: torch.dtype
) -> Placement | None:
    """For one expert of `task`, whose tensor in the bank is of `dtype`; None: it must be converted.

    transposed: the bank's matrices are the module's transposed · stacked: the sources hold all
    experts, [E, …], and a row is made of one line of each.
    """
    sources = flat_sources(task)
    if any(FLOAT_DTYPES.get(stored.dtype) != dtype for stored in sources):
        return None
    shapes = [stored.shape[1:] if stacked else stored.shape for stored in sources]
    copies = _small_copies(shapes)
    given = iter([copy[None] if stacked else copy for copy in copies])
    tensors = {p: [next(given) for _ in group] for p, group in task.sources.items()}
    try:
        row = convert(task, tensors, model)[task.target][0]
    except (ConfigError, LookupError):
        return None  # it needs the real sizes
    order = _order(row.t() if transposed and row.dim() == 2 else row, copies)
    return None if order is None else Placement(tuple(order))


def _small_copies(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Of each shape a small tensor; all elements of all are different."""
    copies, first = [], 0
    for shape in shapes:
        small = [min(size, most) for size, most in zip(shape, SMALL, strict=False)]
        count = prod(small)
        copies.append(torch.arange(first, first + count, dtype=torch.float32).view(small))
        first += count
    return copies


def _order(row: torch.Tensor, copies: list[torch.Tensor]) -> list[int] | None:
    """The order of `copies` that gives `row`, each once and whole; None if there is none."""
    found, left = [], row.reshape(-1)
    starts = {float(copy.reshape(-1)[0]): i for i, copy in enumerate(copies) if copy.numel()}
    while left.numel():
        index = starts.pop(float(left[0]), None)
        if index is None or not torch.equal(
            left[: copies[index].numel()], copies[index].reshape(-1)
        ):
            return None
        found.append(index)
        left = left[copies[index].numel() :]
    return found if len(found) == len(copies) else None
