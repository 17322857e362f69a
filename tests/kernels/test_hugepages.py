from __future__ import annotations

import mmap
import sys

import pytest
import torch

from freetoken.kernels.hugepages import (
    HUGE_PAGE_BYTES,
    MemoryRange,
    collapse_in_background,
    merge_ranges,
)


def test_neighbours_are_merged_and_strangers_are_not() -> None:
    huge = HUGE_PAGE_BYTES
    ranges = [
        MemoryRange(9 * huge, 10 * huge),
        MemoryRange(100, 200),
        MemoryRange(216, 5000),
        MemoryRange(150, 190),
        MemoryRange(5000 + huge, 6000 + huge),
    ]
    assert merge_ranges(ranges) == [
        MemoryRange(100, 5000),
        MemoryRange(5000 + huge, 6000 + huge),
        MemoryRange(9 * huge, 10 * huge),
    ]


def test_less_than_a_huge_page_is_left_alone() -> None:
    assert collapse_in_background([MemoryRange(4096, HUGE_PAGE_BYTES)]) is None


@pytest.mark.skipif(sys.platform != "linux", reason="madvise of Linux")
def test_contents_survive_and_nothing_outside_is_touched() -> None:
    tensor = torch.randint(0, 255, (5 * HUGE_PAGE_BYTES + 777,), dtype=torch.uint8)
    before = tensor.clone()
    start = tensor.data_ptr() + 333
    thread = collapse_in_background([MemoryRange(start, start + 4 * HUGE_PAGE_BYTES)])
    assert thread is not None
    thread.join()
    assert torch.equal(tensor, before)


@pytest.mark.skipif(sys.platform != "linux", reason="madvise of Linux")
def test_memory_that_cannot_be_moved_is_no_error() -> None:
    with mmap.mmap(-1, 8 * HUGE_PAGE_BYTES, mmap.MAP_SHARED) as shared:
        view = torch.frombuffer(shared, dtype=torch.uint8)
        start = view.data_ptr()
        thread = collapse_in_background([MemoryRange(start, start + len(view))])
        if thread is not None:
            thread.join()
        del view
