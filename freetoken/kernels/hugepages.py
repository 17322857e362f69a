"""Moves weights to huge pages, so that reading them all in a step does not wait for the TLB.

A model's weights are read once per step, front to back: with 4 KiB pages each 4 KiB costs a miss.
The demo's shape on two Zen 5 cores, 2026-12-01, ms a decode step of 1 row / 8 rows, before and
after in one process: 25.2 / 58.3 and 23.5 / 56.4; the gain was between 5 and 15 % in five runs.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

HUGE_PAGE_BYTES = 2 << 20
# madvise(2): the first asks for huge pages in future, the second (Linux 6.1) makes them now.
MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25
# One call holds the memory map for milliseconds; steps go on between two.
PIECE_BYTES = 4 * HUGE_PAGE_BYTES


@dataclass(frozen=True, slots=True, order=True)
class MemoryRange:
    """Bytes `[start, end)` of this process's memory."""

    start: int
    end: int


def collapse_in_background(ranges: Iterable[MemoryRange]) -> threading.Thread | None:
    """Give `ranges` huge pages while serving goes on: 1 to 3 s per GB.

    Contents and addresses stay; a range that is freed meanwhile does no harm. Returns the thread;
    None where the system has no such call or the ranges are too small. Whatever cannot be moved
    stays on small pages.
    """
    pieces = list(_pieces(ranges))
    madvise = _find_madvise()
    if madvise is None or not pieces:
        return None

    def collapse() -> None:
        for piece in pieces:
            size = piece.end - piece.start
            if madvise(piece.start, size, MADV_HUGEPAGE) != 0:
                return
            madvise(piece.start, size, MADV_COLLAPSE)

    thread = threading.Thread(target=collapse, name="huge-pages", daemon=True)
    thread.start()
    return thread


def merge_ranges(ranges: Iterable[MemoryRange]) -> list[MemoryRange]:
    """Sorted ranges, joined where less than a huge page lies between them.

    Tensors of one heap lie side by side, with a header between them.
    """
    merged: list[MemoryRange] = []
    for piece in sorted(ranges):
        if merged and piece.start - merged[-1].end < HUGE_PAGE_BYTES:
            last = merged.pop()
            piece = MemoryRange(last.start, max(last.end, piece.end))
        merged.append(piece)
    return merged


def _pieces(ranges: Iterable[MemoryRange]) -> Iterator[MemoryRange]:
    """Aligned pieces of the whole huge pages within the ranges."""
    for merged in merge_ranges(ranges):
        start = -(-merged.start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = merged.end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        for piece in range(start, end, PIECE_BYTES):
            yield MemoryRange(piece, min(piece + PIECE_BYTES, end))


def _find_madvise() -> ctypes._NamedFuncPointer | None:
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise
