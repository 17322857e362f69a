"""How often each token stands in a row's output, and whether in its prompt: for penalties.

Only rows with a penalty are held. Called by the sampler.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from freetoken.wire.messages import unpack_ids
from freetoken.worker.transfer import to_device

RowIds = npt.NDArray[np.int64]


class TokenCounts:
    """Per penalised row: how often each token stands in its output, and whether in its prompt.

    Memory is taken as rows with penalties come, `5 · V` bytes each, at most `max_rows` of them.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._vocab_size = vocab_size
        self._seats: dict[int, int] = {}
        self._free: list[int] = []
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def start(self, row_id: int, prompt_ids: bytes, output_ids: bytes) -> None:
        if not self._free:
            self._grow()
        seat = self._seats[row_id] = self._free.pop()
        self._counts[seat] = 0
        self._in_prompt[seat] = False
        self._in_prompt[seat].index_fill_(0, self._known(prompt_ids), True)
        output = self._known(output_ids)
        self._counts[seat].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def forget(self, row_id: int) -> None:
        seat = self._seats.pop(row_id, None)
        if seat is not None:
            self._free.append(seat)

    def read(self, row_ids: RowIds) -> tuple[Tensor, Tensor]:
        """([m, V] int32 counts, [m, V] bool in the prompt) of rows that were started."""
        seats = self._find(row_ids)
        return self._counts[seats], self._in_prompt[seats]

    def add(self, row_ids: RowIds, tokens: Tensor) -> None:
        """Count `tokens` [m], one for each row; those below 0 were not drawn."""
        seats = self._find(row_ids)
        self._counts[seats, tokens.clamp(min=0)] += (tokens >= 0).to(torch.int32)

    def _find(self, row_ids: RowIds) -> Tensor:
        seats = np.array([self._seats[row] for row in row_ids.tolist()], np.int64)
        return to_device(seats, self._counts.device)

    def _known(self, ids: bytes) -> Tensor:
        tokens = np.array(unpack_ids(ids), np.int64)
        known = tokens[(tokens >= 0) & (tokens < self._vocab_size)]
        return to_device(known, self._counts.device)

    def _grow(self) -> None:
        old = len(self._counts)
        new = min(max(4, 2 * old), self._max_rows)
        for name in ("_counts", "_in_prompt"):
            table: Tensor = getattr(self, name)
            grown = table.new_zeros((new, self._vocab_size))
            grown[:old] = table
            setattr(self, name, grown)
        self._free.extend(range(old, new))
