"""The page pool: which KV pages are free.

A page is exactly one of free (here), owned by a row, or cached in the radix tree; the pool knows
only the first kind. Called by the tree (eviction) and the ledger.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable


class PagePool:
    """A stack of free page ids out of `[0, num_pages)`."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = array("i", range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> array[int]:
        """`count` pages, which must be free."""
        first = len(self._free) - count
        assert first >= 0, f"{count} pages wanted, {len(self._free)} free"
        taken = self._free[first:]
        del self._free[first:]
        return taken

    def give(self, pages: Iterable[int]) -> None:
        """The inverse of `take`; in any order and any portions."""
        self._free.extend(pages)

    def check(self, held: Iterable[int]) -> None:
        """Assert that the free pages and `held` (rows' and tree's) are all pages, each once."""
        pages = sorted([*self._free, *held])
        assert pages == list(range(self.num_pages)), "a page is lost or has two holders"
