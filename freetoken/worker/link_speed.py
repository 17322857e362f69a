"""How fast the link to the GPU is: copies of whole layers, gathers of scattered experts.

Measured once at start, with the same kernel and the same memory that serve; a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from freetoken.experts.cost import Link
from freetoken.kernels import slot_tables
from freetoken.kernels.slot_ops import fetch

MAX_BYTES = 256 << 20
"""Enough for the copy engine's full rate, and little beside what is loaded."""
PLAIN_ROW_BYTES = 8 << 20
NUM_TRIES = 3


def measure_link(device: torch.device, bank_rows: Tensor | None = None) -> Link | None:
    """Bytes per second from host memory to a cuda `device`; None for other devices.

    bank_rows: [E, row_bytes] uint8 cpu, a layer of a bank, pinned as a whole; None or not pinned:
    other memory is measured, and the gather is estimated. Takes up to 256 MiB on the device and
    gives them back. Waits for the device.
    """
    if device.type != "cuda":
        return None
    if bank_rows is None or not bank_rows.is_pinned():
        shape = (MAX_BYTES // PLAIN_ROW_BYTES, PLAIN_ROW_BYTES)
        rows = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        link = Link.of_copy(_measure_copy(rows, torch.empty_like(rows, device=device)))
    else:
        rows = bank_rows[: max(1, MAX_BYTES // bank_rows.shape[1])]
        pool_rows = torch.empty_like(rows, device=device)
        copy_bytes_s = _measure_copy(rows, pool_rows)
        link = Link(copy_bytes_s, min(copy_bytes_s, _measure_gather(rows, pool_rows)))
        del pool_rows
    del rows
    torch.cuda.empty_cache()
    return link


def _measure_copy(rows: Tensor, pool_rows: Tensor) -> float:
    """rows: [n, row_bytes] uint8 cpu, pinned · pool_rows: the same shape, cuda."""
    return _best_rate(rows.nbytes, pool_rows, lambda: pool_rows.copy_(rows, non_blocking=True))


def _measure_gather(rows: Tensor, pool_rows: Tensor) -> float:
    """Fetches every second row, then the others, as a step that misses half of a layer would."""
    count = len(rows)
    tables = slot_tables.allocate(1, count, 1, 1, pool_rows.device)
    order = [*range(0, count, 2), *range(1, count, 2)]
    tables.fetch_experts.copy_(torch.tensor(order, dtype=torch.int32))
    tables.fetch_rows.copy_(torch.arange(count, dtype=torch.int32))
    tables.num_fetch.fill_(count)
    return _best_rate(rows.nbytes, pool_rows, lambda: fetch(rows, pool_rows, tables))


def _best_rate(num_bytes: int, pool_rows: Tensor, move: Callable[[], object]) -> float:
    """Bytes per second of the fastest of some tries, after one that is not counted."""
    times_ms: list[float] = []
    with torch.cuda.device(pool_rows.device):
        move()
        for _ in range(NUM_TRIES):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            move()
            end.record()
            end.synchronize()
            times_ms.append(start.elapsed_time(end))
    return num_bytes / (min(times_ms) / 1e3)
