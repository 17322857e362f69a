"""Operations on slot tables: plain torch for tables on the CPU, Triton and cuda/ on a GPU.

On a GPU nothing waits for the device and nothing depends on its values, so that all of it may be
captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch

from freetoken.kernels import reference_slots
from freetoken.kernels.dispatch import use_triton
from freetoken.kernels.slot_tables import SlotTables


def resolve(
    tables: SlotTables, ids: torch.Tensor, num_tokens: torch.Tensor | None, layer: int
) -> None:
    """Say where each expert that a layer's tokens ask for is or goes; once per layer and step.

    ids: [T, K] int32 or int64; those outside [0, E), and of tokens ≥ num_tokens ([1] int32), are
    skipped. Fills the tables' lists of the layer; `fetch` must follow before they are used.
    Takes slots from experts that this step has not asked for so far; an expert that gets none has
    a scratch row until the next resolve.
    """
    assert ids.numel() <= tables.max_pairs, f"{ids.numel()} pairs, max_pairs {tables.max_pairs}"
    _implementation(tables.slot_of).resolve(tables, ids, num_tokens, layer)


def build_queue(tables: SlotTables) -> None:
    """End an on-demand step: put the next step's victims in order, let priorities decay."""
    _implementation(tables.slot_of).build_queue(tables)


def fetch(bank_rows: torch.Tensor, pool_rows: torch.Tensor, tables: SlotTables) -> None:
    """Copy the rows that `resolve` listed from the layer's bank to the pool.

    bank_rows: [E, row_bytes] uint8 cpu, contiguous; pinned (kernels/pinned.py) if the pool is on a
    GPU, which reads it over the link · pool_rows: [N + E, row_bytes] uint8 · row_bytes: a multiple
    of 16.
    """
    assert bank_rows.shape[1] == pool_rows.shape[1], "bank and pool have different rows"
    _implementation(pool_rows).fetch(bank_rows, pool_rows, tables)


def _implementation(tensor: torch.Tensor) -> Any:
    if use_triton(tensor):
        from freetoken.kernels import triton_slots  # triton is loaded only where it is used

        return triton_slots
    return reference_slots
