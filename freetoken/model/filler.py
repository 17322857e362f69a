"""Fills weights and banks from checkpoint tensors: through transformers' converter, or, where that
only puts tensors side by side, straight from the file into the bank's row.

Called by fill.py from several threads at once.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

import torch
from transformers import PreTrainedModel

from freetoken.errors import ConfigError
from freetoken.experts.bank import RowBank
from freetoken.model.assemble import Weights
from freetoken.model.conversion import BankTarget, DtypePlan, Task, convert, read_sources
from freetoken.model.placement import Placement, find_placement, flat_sources
from freetoken.model.tensors import TensorReader


class Filler:
    """Shared by the threads of a load."""

    def __init__(self, model: PreTrainedModel, weights: Weights, reader: TensorReader) -> None:
        self._model = model
        self._weights = weights
        self._reader = reader
        self._dtypes = DtypePlan(model)
        self._placements: dict[Hashable, Placement | None] = {}
        self._lock = threading.Lock()

    def fill(self, task: Task, experts: range | None) -> None:
        """`experts`: which ones, where the task's sources stack all of a layer; else None."""
        target = task.bank
        if target is None:
            for name, tensor in self._convert(task).items():
                self._weights.put(name, tensor)
        elif experts is not None:
            for expert in experts:
                self._fill_expert(task, target, expert, (expert, expert + 1))
        elif task.expert is not None:
            self._fill_expert(task, target, task.expert, None)
        else:
            rows = _rows(task, self._convert(task), target.num_experts)
            for expert, row in enumerate(rows):
                self._weights.put_expert(target, expert, row)

    def _fill_expert(
        self, task: Task, target: BankTarget, expert: int, lines: tuple[int, int] | None
    ) -> None:
        """`lines`: those of the sources that are the expert's, None: all."""
        bank = self._weights.banks[target.module_name]
        if not isinstance(bank, RowBank):
            self._convert_expert(task, target, expert, lines)
            return
        sources = [(s.dtype, s.shape) for s in flat_sources(task)]
        patterns = tuple(task.sources) if task.converter else ()
        kind = (target.parameter_name, bank.layout, lines is None, patterns, *sources)
        with self._lock:  # one thread finds out, the others wait
            if kind not in self._placements:
                self._placements[kind] = self._try_placement(task, target, bank, expert, lines)
                return
        placement = self._placements[kind]
        if placement is None:
            self._convert_expert(task, target, expert, lines)
        else:
            self._place_expert(task, placement, bank.tensor(expert, target.parameter_name), lines)

    def _try_placement(
        self,
        task: Task,
        target: BankTarget,
        bank: RowBank,
        expert: int,
        lines: tuple[int, int] | None,
    ) -> Placement | None:
        """Fill this expert in both ways if there are two; the placement if both agree."""
        module: Any = self._model.get_submodule(target.module_name)
        tensor = bank.tensor(expert, target.parameter_name)
        dtype = self._dtypes.of(task.target)
        placement = None
        if dtype == tensor.dtype:
            placement = find_placement(
                task,
                self._model,
                transposed=bool(module.is_transposed),
                stacked=lines is not None,
                dtype=dtype,
            )
        self._convert_expert(task, target, expert, lines)
        if placement is None:
            return None
        converted = tensor.clone()
        if not self._place_expert(task, placement, tensor, lines):
            return None
        if torch.equal(converted.view(torch.uint8), tensor.view(torch.uint8)):
            return placement
        tensor.copy_(converted)
        return None

    def _convert_expert(
        self, task: Task, target: BankTarget, expert: int, lines: tuple[int, int] | None
    ) -> None:
        row = _rows(task, self._convert(task, lines), 1)[0]
        self._weights.put_expert(target, expert, row)

    def _place_expert(
        self,
        task: Task,
        placement: Placement,
        tensor: torch.Tensor,
        lines: tuple[int, int] | None,
    ) -> bool:
        """Read the sources into `tensor`, which they fill exactly; False if they do not."""
        left = tensor.view(-1).view(torch.uint8)
        parts = []
        for stored in placement.sources(task):
            size = stored.num_bytes if lines is None else stored.num_bytes // stored.shape[0]
            parts.append((stored, left[:size]))
            left = left[size:]
        if left.numel() or sum(part.nbytes for _, part in parts) != tensor.nbytes:
            return False
        for stored, part in parts:
            self._reader.read_into(stored, part, lines)
        return True

    def _convert(self, task: Task, lines: tuple[int, int] | None = None) -> dict[str, torch.Tensor]:
        self._reader.start_over()
        dtype = self._dtypes.of(task.target)
        return convert(task, read_sources(task, self._reader, dtype, lines), self._model)


def _rows(task: Task, converted: dict[str, torch.Tensor], num_rows: int) -> torch.Tensor:
    tensor = converted.get(task.target)
    if tensor is None or tensor.shape[0] != num_rows:
        raise ConfigError(
            f"the checkpoint's tensors for {task.target} do not give {num_rows} experts: "
            f"{ {name: tuple(t.shape) for name, t in converted.items()} }"
        )
    return tensor
