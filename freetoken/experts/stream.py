"""Copies expert rows from a host bank to rows on the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def copy_rows(bank: torch.Tensor, rows: torch.Tensor, moves: Iterable[tuple[int, int]]) -> int:
    """Copy row `expert` of `bank` to row `row` of `rows` for each (expert, row); return bytes.

    bank: [E, row_bytes] uint8 cpu · rows: [N, row_bytes] uint8, any device.
    """
    num_bytes = 0
    for expert, row in moves:
        rows[row].copy_(bank[expert])
        num_bytes += bank.shape[1]
    return num_bytes
