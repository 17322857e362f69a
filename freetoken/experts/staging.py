"""Copies expert rows from a host bank to the device, whether the bank is pinned or not.

From pinned memory a copy is queued and done by the copy engine. Other memory goes through two small
pinned buffers: the host fills one while the engine empties the other. On a CPU rows are copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from freetoken.experts.bank import RowBank
from freetoken.kernels import cuda_library

STAGING_BYTES = 32 << 20
"""Of each buffer, or one row if that is more."""


class RowCopier:
    """Copies on the current stream; buffers are made when first needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = []
        self._emptied: list[torch.cuda.Event] = []
        self._turn = 0

    def copy(self, bank: RowBank, rows: torch.Tensor, moves: Sequence[tuple[int, int]]) -> None:
        """Copy row `expert` of the bank to row `row` of `rows` for each (expert, row).

        rows: [N, row_bytes] uint8. Rows that follow each other on both sides are copied as one.
        From pinned memory nothing waits; otherwise the host is done with the bank at return.
        """
        if self._device.type == "cpu" or bank.is_pinned:
            copy_rows(bank.rows, rows, moves)
            return
        for expert, row, count in merge_runs(moves):
            self._copy_staged(bank.rows[expert : expert + count], rows[row : row + count])

    def _copy_staged(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """source, target: [n, row_bytes] uint8."""
        if not self._buffers:
            size = max(STAGING_BYTES, source.shape[1])
            self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in "12"]
            self._emptied = [torch.cuda.Event() for _ in self._buffers]
        step = len(self._buffers[0]) // source.shape[1]
        for first in range(0, len(source), step):
            part = source[first : first + step]
            self._turn = 1 - self._turn
            self._emptied[self._turn].synchronize()
            staged = self._buffers[self._turn][: part.numel()].view(part.shape)
            staged.copy_(part)
            target[first : first + step].copy_(staged, non_blocking=True)
            self._emptied[self._turn].record()


def copy_rows(source: torch.Tensor, target: torch.Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Queue copies of row a of `source` to row b of `target` for each (a, b), runs as one.

    source, target: [·, row_bytes] uint8, on the device or pinned, or both on the CPU.
    """
    library = cuda_library.load() if target.is_cuda else None
    if library is not None:
        library.copy_rows(source, target, moves)
        return
    for first, row, count in merge_runs(moves):
        target[row : row + count].copy_(source[first : first + count], non_blocking=True)


def merge_runs(moves: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(expert, row) pairs as (first expert, first row, how many): runs in which both count up."""
    runs: list[tuple[int, int, int]] = []
    for expert, row in moves:
        if runs:
            first_expert, first_row, count = runs[-1]
            if (expert, row) == (first_expert + count, first_row + count):
                runs[-1] = (first_expert, first_row, count + 1)
                continue
        runs.append((expert, row, 1))
    return runs
