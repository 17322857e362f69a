"""The ledger: which row holds which pages. The only place where pages change hands.

A row's pages are the locked path of the tree (shared) and then its own. Whole pages become the
tree's when their step is back (`settle`); a partial tail only when the row leaves. A row that
finds its next page in the tree already, because another row computed the same tokens at the same
time, keeps its own pages to itself until it leaves: so it never holds more than its length needs,
and the oldest row always fits alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from freetoken.scheduler.fit import Capacity, Need, Now, Verdict, fit, num_pages_for
from freetoken.scheduler.node import TOKEN_BYTES
from freetoken.scheduler.pages import PagePool
from freetoken.scheduler.radix import Match, RadixTree
from freetoken.scheduler.request import PageCopy, Request


class Ledger:
    """Pool and tree of one life of the worker."""

    def __init__(self, num_pages: int, page_size: int, num_rows: int, context_tokens: int) -> None:
        self.page_size = page_size
        self.num_rows = num_rows
        self.context_tokens = context_tokens
        self.num_copies = 0  # page copies not done yet; each locks its source for a step
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(page_size, self.pool)
        self._free_rows = list(range(num_rows - 1, -1, -1))

    @property
    def num_available(self) -> int:
        """Pages that are free or can be evicted."""
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def capacity(self, headroom: int = 0) -> Capacity:
        """As of now, keeping `headroom` pages for the rows that run."""
        return Capacity(
            context_tokens=self.context_tokens,
            page_size=self.page_size,
            num_pages=self.pool.num_pages,
            num_rows=self.num_rows,
            free_pages=self.num_available - headroom,
            free_rows=len(self._free_rows),
        )

    def need(self, num_tokens: int, shared_pages: int = 0) -> Need:
        pages = num_pages_for(num_tokens, self.page_size)
        return Need(num_tokens, pages, pages - shared_pages)

    # ------------------------------------------------------------ a row's life

    def match(self, request: Request) -> Match:
        """The cached prefix that `request` can use: all but its last token, which must run."""
        if request.api is None:
            return self.tree.match(b"", None)
        return self.tree.match(request.ids[:-TOKEN_BYTES], request.salt)

    def seat(self, request: Request, match: Match, headroom: int) -> Verdict:
        """Give `request` a row id, the matched prefix and pages for all its tokens, if it fits.

        A partial page to copy comes as `request.copy`, with its source locked; if that is what
        makes it not fit, it goes without.
        """
        tree = self.tree
        need = self.need(request.num_tokens, match.num_pages)
        node = tree.lock_match(match)
        source = match.child if match.partial else None
        if source is not None:
            tree.lock(source)
            if not isinstance(fit(need, self.capacity(headroom)), Now):
                tree.unlock(source)
                source = None
        verdict = fit(need, self.capacity(headroom))
        if not isinstance(verdict, Now):
            tree.unlock(node)
            return verdict
        request.row_id = self._free_rows.pop()
        request.node = node
        request.pages = tree.path_pages(node)
        request.tree_pages = match.num_pages
        request.pages.extend(self._take(need.new_pages))
        request.cached_len = match.num_pages * self.page_size
        request.kv_len = request.cached_len
        if source is not None:
            request.cached_len += match.partial
            own = request.pages[match.num_pages]
            request.copy = PageCopy(source.pages[0], own, source)
            self.num_copies += 1
        request.planned_len = request.cached_len
        request.settle_at = (match.num_pages + 1) * self.page_size
        self._limit(request)
        return verdict

    def add_page(self, request: Request) -> bool:
        """One more page for `request`; False if none is free or evictable."""
        if not self.num_available:
            return False
        request.pages.extend(self._take(1))
        self._limit(request)
        return True

    def settle(self, request: Request) -> None:
        """Hand the whole computed pages of a row to the tree. Call when kv_len reaches
        `settle_at`."""
        size = self.page_size
        whole = request.kv_len // size
        request.settle_at = (whole + 1) * size
        if request.is_private or whole <= request.tree_pages:
            return
        assert request.node is not None
        key = self._key(request, whole * size)
        node = self.tree.grow(request.node, key, request.pages[request.tree_pages : whole])
        if node is None:
            request.is_private = True
        else:
            request.node, request.tree_pages = node, whole

    def leave(self, request: Request, keep: bool) -> int:
        """Take back row id, lock and pages; with `keep` the computed ones enter the tree.

        Returns the row id, which the worker must forget before it is used again.
        """
        node, row_id = request.node, request.row_id
        assert node is not None
        assert row_id >= 0
        if request.copy is not None:
            self.end_copy(request.copy)  # it was never planned
        own = request.pages[request.tree_pages :]
        if keep and request.api is not None:
            kv_len = min(request.kv_len, request.num_tokens)
            key = self._key(request, kv_len)
            num_kept = num_pages_for(kv_len, self.page_size) - request.tree_pages
            self.tree.absorb(node, key, own[:num_kept])
            own = own[num_kept:]
        self.pool.give(own)
        self.tree.unlock(node)
        self._free_rows.append(row_id)
        request.leave_row()
        return row_id

    def end_copy(self, copy: PageCopy) -> None:
        """The copy is done, or will never be: its source may be evicted again."""
        self.num_copies -= 1
        self.tree.unlock(copy.lock)

    def _key(self, request: Request, end: int) -> bytearray:
        first = request.tree_pages * self.page_size * TOKEN_BYTES
        return request.ids[first : end * TOKEN_BYTES]

    def _take(self, count: int) -> array[int]:
        missing = count - self.pool.num_free
        if missing > 0:
            self.tree.evict(missing)
        return self.pool.take(count)

    def _limit(self, request: Request) -> None:
        request.decode_limit = min(len(request.pages) * self.page_size, request.decode_end)

    # ------------------------------------------------------------ accounting

    def check(self, rows: Iterable[Request]) -> None:
        """Assert that every page is exactly one of free, owned, cached, and the same for rows.

        `rows` are all requests with a row.
        """
        held = self.tree.check()
        ids = list(self._free_rows)
        for request in rows:
            assert request.node is not None
            assert request.node.num_locks > 0
            shared = self.tree.path_pages(request.node)
            assert shared == request.pages[: request.tree_pages], "a row lost its prefix"
            assert len(request.pages) * self.page_size >= request.planned_len >= request.kv_len
            held.extend(request.pages[request.tree_pages :])
            ids.append(request.row_id)
        self.pool.check(held)
        assert sorted(ids) == list(range(self.num_rows)), "a row id is lost or used twice"

    def check_idle(self) -> None:
        """Assert that without rows every page is free or evictable, and every row id free."""
        assert self.num_available == self.pool.num_pages, "pages leaked"
        assert self.tree.num_evictable == self.tree.num_pages, "a lock leaked"
        assert len(self._free_rows) == self.num_rows, "a row id leaked"
