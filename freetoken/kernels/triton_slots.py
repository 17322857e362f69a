"""Slots on a GPU: resolve and build_queue in Triton, fetch from cuda/ or, without it, in Triton.

See reference_slots.py for what they compute; slot for slot the same.
"""

from __future__ import annotations

import torch

from freetoken.kernels import cuda_library, triton_fetch
from freetoken.kernels.slot_tables import SlotTables
from freetoken.kernels.triton_queue import build_queue
from freetoken.kernels.triton_resolve import resolve

__all__ = ["build_queue", "fetch", "resolve"]


def fetch(bank_rows: torch.Tensor, pool_rows: torch.Tensor, tables: SlotTables) -> None:
    """See slot_ops.fetch. One launch."""
    library = cuda_library.load()
    if library is None:
        triton_fetch.fetch(
            bank_rows, pool_rows, tables.fetch_experts, tables.fetch_rows, tables.num_fetch
        )
    else:
        library.fetch_rows(
            bank_rows, pool_rows, tables.fetch_experts, tables.fetch_rows, tables.num_fetch
        )
