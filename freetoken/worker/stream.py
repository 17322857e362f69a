"""The random numbers of all rows, computed some positions ahead."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from freetoken.worker.philox import uniforms

AHEAD = 64
"""Philox in numpy costs 0.1 ms a call, for one number as for a thousand: too much for each step."""

RowIds = npt.NDArray[np.int64]


class UniformStream:
    """For each row the numbers of its seed at positions `[first, first + AHEAD)`."""

    def __init__(self, max_rows: int) -> None:
        self._seed = np.zeros(max_rows, np.uint64)
        self._first = np.zeros(max_rows, np.int64)
        self._is_known = np.zeros(max_rows, np.bool_)
        self._numbers = np.zeros((max_rows, AHEAD), np.float64)

    def start(self, row_id: int, seed: int) -> None:
        self._seed[row_id] = seed
        self._is_known[row_id] = False

    def read(self, row_ids: RowIds, positions: RowIds) -> npt.NDArray[np.float64]:
        """[n] in [0, 1): the number of each row at its position."""
        offsets = positions - self._first[row_ids]
        is_held = self._is_known[row_ids] & (offsets >= 0) & (offsets < AHEAD)
        if not is_held.all():
            self._compute(row_ids[~is_held], positions[~is_held])
            offsets = positions - self._first[row_ids]
        numbers: npt.NDArray[np.float64] = self._numbers[row_ids, offsets]
        return numbers

    def _compute(self, row_ids: RowIds, positions: RowIds) -> None:
        ahead = (positions[:, None] + np.arange(AHEAD)).astype(np.uint64)
        self._numbers[row_ids] = uniforms(self._seed[row_ids][:, None], ahead)
        self._first[row_ids] = positions
        self._is_known[row_ids] = True
