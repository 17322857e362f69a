"""The paged KV pools, page copies, and the page table of all rows.

The pools hold `num_pages` usable pages and one more, the sentinel, which padding writes to. Page
ids come from the scheduler and have been checked by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from freetoken.model.context import KvPools
from freetoken.worker.transfer import to_device


class KvHeads(Protocol):
    """K/v of one attention layer: heads, and elements of a key and of a value."""

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def k_dim(self) -> int: ...
    @property
    def v_dim(self) -> int: ...


def allocate_pools(
    layers: Sequence[KvHeads],
    *,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KvPools:
    """Pools of `num_pages` + 1 pages for each attention layer.

    Zeroed: attention multiplies what lies behind the end of a row by a weight of 0, and stale
    memory could hold NaN.
    """

    def pool(num_heads: int, size: int) -> torch.Tensor:
        shape = (num_pages + 1, page_size, num_heads, size)
        return torch.zeros(shape, dtype=dtype, device=device)

    return KvPools(
        k=tuple(pool(layer.num_kv_heads, layer.k_dim) for layer in layers),
        v=tuple(pool(layer.num_kv_heads, layer.v_dim) for layer in layers),
        page_size=page_size,
    )


def pool_bytes(pools: KvPools) -> int:
    """Bytes allocated, sentinel pages included."""
    return sum(pool.nbytes for pool in (*pools.k, *pools.v))


def copy_pages(pools: KvPools, copies: Sequence[tuple[int, int]]) -> None:
    """Copy whole pages (source, destination) in all layers; no destination is also a source."""
    if not copies:
        return
    device = pools.k[0].device
    sources, destinations = to_device(np.array(copies, np.int64), device).unbind(1)
    for pool in (*pools.k, *pools.v):
        pool[destinations] = pool[sources]


class PageTable:
    """`device`: [R, max_pages] int32, what attention reads; only additions are written to it."""

    def __init__(self, max_rows: int, max_pages: int, device: torch.device) -> None:
        self.device = torch.zeros((max_rows, max_pages), dtype=torch.int32, device=device)
        self.num_pages = np.zeros(max_rows, np.int64)
        self.max_pages = max_pages
        self._added: list[tuple[int, npt.NDArray[np.int32]]] = []  # (flat index, page ids)

    def clear(self, row_ids: npt.NDArray[np.int64]) -> None:
        self.num_pages[row_ids] = 0

    def add(self, row_id: int, first: int, page_ids: npt.NDArray[np.int32]) -> None:
        """Add pages `[first, first + n)` of a row; `first` is at most the number it has."""
        self.num_pages[row_id] = first + len(page_ids)
        self._added.append((row_id * self.max_pages + first, page_ids))

    def flush(self) -> None:
        """Write what was added, before a forward reads it: all of it in one copy."""
        added, self._added = self._added, []
        flat = self.device.view(-1)
        if not added or flat.device.type == "cpu":
            for at, page_ids in added:
                flat[at : at + len(page_ids)] = torch.from_numpy(page_ids)
            return
        places = [np.arange(at, at + len(page_ids)) for at, page_ids in added]
        pages = [page_ids for _, page_ids in added]
        indices, ids = np.concatenate(places), np.concatenate(pages)
        if len(added) > 1:
            # Of what was written twice, the last counts; index_copy_ promises no order.
            indices, last = np.unique(indices[::-1], return_index=True)
            ids = ids[::-1][last]
        packed = np.stack([indices, ids]).astype(np.int64)
        at_device, pages_device = to_device(packed, flat.device)
        flat.index_copy_(0, at_device, pages_device.to(torch.int32))
