"""The radix tree of cached prefixes: which pages hold the k/v of which tokens.

Token ids are bytes (int32 little-endian, as on the wire), so comparing is memcmp. A node is a run
of pages; siblings may share tokens but never a whole first page, so they are kept sorted and the
longest common prefix is at a neighbour of the insertion point. Only a leaf may end in a partial
page. Matching is exact to the token: whole pages are shared, the rest of a match names a page to
copy from.

Locks are counted along the path to the root, so a locked node's ancestors are locked, and the
unlocked nodes can all be evicted from their leaves. The tree gives what it drops to the pool; it
knows neither rows nor requests. Called by the ledger only.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from freetoken.scheduler.lru import LeafQueue
from freetoken.scheduler.node import TOKEN_BYTES, Node, common_bytes
from freetoken.scheduler.pages import PagePool


class Match(NamedTuple):
    """The longest cached prefix. `node` matches whole, and `inside` pages plus `partial` tokens
    of its child `child`. Void after the next change of the tree. (A tuple: see fit.py.)"""

    node: Node
    child: Node | None
    inside: int
    partial: int
    num_pages: int  # whole pages, from the root


class RadixTree:
    """One tree per cache salt over one pool."""

    def __init__(self, page_size: int, pool: PagePool) -> None:
        self.page_size = page_size
        self.num_pages = 0
        self.num_evictable = 0
        self._page_bytes = page_size * TOKEN_BYTES
        self._pool = pool
        self._roots: dict[str | None, Node] = {}
        self._leaves = LeafQueue()
        self._num_nodes = 0
        self._clock = 0

    # ------------------------------------------------------------ reading

    def match(self, ids: bytes | bytearray, salt: str | None) -> Match:
        """The longest prefix of `ids` in the tree of `salt`."""
        node = self._root(salt)
        page_bytes = self._page_bytes
        at = 0
        while at < len(ids):
            child, common = self._nearest(node, ids[at : at + page_bytes])
            if child is None or common < TOKEN_BYTES:
                break
            if common == page_bytes:
                key = child.key
                whole = ids.startswith(key, at)
                common = len(key) if whole else common_bytes(key, ids[at : at + len(key)])
                if whole and len(key) % page_bytes == 0:
                    node, at = child, at + len(key)
                    continue
            inside, rest = divmod(common, page_bytes)
            pages = at // page_bytes + inside
            return Match(node, child, inside, rest // TOKEN_BYTES, pages)
        return Match(node, None, 0, 0, at // page_bytes)

    @staticmethod
    def path_pages(node: Node) -> array[int]:
        """The pages from the root to the end of `node`, in order of position."""
        runs = []
        at: Node | None = node
        while at is not None:
            runs.append(at.pages)
            at = at.parent
        pages = array("i")
        for run in reversed(runs):
            pages.extend(run)
        return pages

    # ------------------------------------------------------------ locks

    def lock_match(self, match: Match) -> Node:
        """Lock exactly the whole pages of `match`; the node that ends with them."""
        node = match.node
        if match.inside:
            assert match.child is not None
            node = self._split(match.child, match.inside)
        self.lock(node)
        return node

    def lock(self, node: Node) -> None:
        at: Node | None = node
        while at is not None:
            if at.num_locks == 0:
                self.num_evictable -= len(at.pages)
            at.num_locks += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        self._clock += 1
        at: Node | None = node
        while at is not None:
            assert at.num_locks > 0, "unlocked more often than locked"
            at.num_locks -= 1
            at.used_at = self._clock
            if at.num_locks == 0:
                self.num_evictable += len(at.pages)
            at = at.parent
        self._offer(node)
        self._drop_empty_root(node)

    # ------------------------------------------------------------ growing

    def grow(self, node: Node, key: bytes | bytearray, pages: array[int]) -> Node | None:
        """Take whole `pages` of a running row below its locked `node`; the lock moves along.

        None, and nothing taken, if the tree has the first of them already (another row computed
        the same tokens): the caller then keeps its pages to itself.
        """
        if node.children and self._nearest(node, key[: self._page_bytes])[1] == self._page_bytes:
            return None
        if node.parent is not None and not node.children and node.num_locks == 1:
            node.key += key
            node.pages.extend(pages)
            self.num_pages += len(pages)
            return node
        leaf = self._attach(node, key, pages)
        leaf.num_locks = 1
        self.num_evictable -= len(pages)
        return leaf

    def absorb(self, node: Node, key: bytes | bytearray, pages: array[int]) -> None:
        """Take `pages`, which hold `key` below `node`; the last may be partial.

        What the tree has already goes to the pool.
        """
        page_bytes = self._page_bytes
        at = 0
        while at < len(key):
            first = key[at : at + page_bytes]
            child, common = self._nearest(node, first)
            if child is None or common < len(first):
                break
            if len(first) < page_bytes:
                self._pool.give(pages[at // page_bytes :])
                return
            rest = key[at : at + len(child.key)]
            common = common_bytes(child.key, rest)
            num_common = common // page_bytes
            taken = at // page_bytes
            self._pool.give(pages[taken : taken + num_common])
            at += num_common * page_bytes
            if at + common % page_bytes == len(key):
                self._pool.give(pages[taken + num_common :])  # its partial tail is here too
                return
            whole = num_common * page_bytes == len(child.key)
            node = child if whole else self._split(child, num_common)
        if at < len(key):
            leaf = self._attach(node, key[at:], pages[at // page_bytes :])
            self._offer(leaf)

    # ------------------------------------------------------------ eviction

    def evict(self, count: int) -> None:
        """Give at least `count` pages to the pool, or all that can be: least recently used leaf
        first, from its end."""
        while count > 0 and (leaf := self._leaves.pop()) is not None:
            if len(leaf.pages) > count:
                self._trim(leaf, count)
                self._offer(leaf)
                return
            count -= len(leaf.pages)
            self._remove(leaf)

    def _trim(self, leaf: Node, count: int) -> None:
        keep = len(leaf.pages) - count
        self._pool.give(leaf.pages[keep:])
        del leaf.pages[keep:]
        del leaf.key[keep * self._page_bytes :]
        self.num_pages -= count
        self.num_evictable -= count

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        self._pool.give(leaf.pages)
        self.num_pages -= len(leaf.pages)
        self.num_evictable -= len(leaf.pages)
        at = bisect_left(parent.child_keys, self._head(leaf))
        del parent.child_keys[at], parent.children[at]
        leaf.parent = None
        self._num_nodes -= 1
        self._offer(parent)
        self._drop_empty_root(parent)

    # ------------------------------------------------------------ structure

    def _root(self, salt: str | None) -> Node:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(bytearray(), array("i"), None, salt=salt)
        return root

    def _drop_empty_root(self, node: Node) -> None:
        if node.parent is None and not node.children and not node.num_locks:
            self._roots.pop(node.salt, None)

    def _head(self, node: Node) -> bytes:
        return bytes(node.key[: self._page_bytes])

    def _nearest(self, node: Node, first: bytes | bytearray) -> tuple[Node | None, int]:
        """The child that shares most bytes with `first` (at most a page), and how many."""
        keys = node.child_keys
        if not keys:
            return None, 0
        wanted = bytes(first)
        at = bisect_left(keys, wanted)
        best, most = None, -1
        if at < len(keys):
            best, most = node.children[at], common_bytes(keys[at], wanted)
        if most < len(wanted) and at > 0:
            common = common_bytes(keys[at - 1], wanted)
            if common > most:
                best, most = node.children[at - 1], common
        return best, most

    def _attach(self, node: Node, key: bytes | bytearray, pages: array[int]) -> Node:
        """A new unlocked leaf below `node`; a sibling that is a mere beginning of it goes."""
        leaf = Node(bytearray(key), pages[:], node)
        self._clock += 1
        leaf.used_at = self._clock
        head = self._head(leaf)
        at = bisect_left(node.child_keys, head)
        node.child_keys.insert(at, head)
        node.children.insert(at, leaf)
        self.num_pages += len(pages)
        self.num_evictable += len(pages)
        self._num_nodes += 1
        if at > 0 and head.startswith(node.child_keys[at - 1]):
            shorter = node.children[at - 1]
            if not shorter.num_locks:
                self._remove(shorter)
        return leaf

    def _split(self, node: Node, num_pages: int) -> Node:
        """Cut `node` after `num_pages`; the new upper half. `node` itself becomes the lower."""
        parent = node.parent
        assert parent is not None
        cut = num_pages * self._page_bytes
        upper = Node(node.key[:cut], node.pages[:num_pages], parent)
        upper.num_locks, upper.used_at = node.num_locks, node.used_at
        parent.children[bisect_left(parent.child_keys, self._head(upper))] = upper
        del node.key[:cut], node.pages[:num_pages]
        node.parent = upper
        upper.children.append(node)
        upper.child_keys.append(self._head(node))
        self._num_nodes += 1
        return upper

    def _offer(self, node: Node) -> None:
        """Put `node` up for eviction if it is an unlocked leaf."""
        if node.is_evictable:
            self._leaves.push(node, self._num_nodes)

    # ------------------------------------------------------------ accounting

    def nodes(self) -> Iterator[Node]:
        todo = list(self._roots.values())
        while todo:
            node = todo.pop()
            yield node
            todo.extend(node.children)

    def check(self) -> list[int]:
        """Assert the structure and the counts; all cached pages."""
        pages: list[int] = []
        num_evictable = 0
        for node in self.nodes():
            node.check(self.page_size)
            pages.extend(node.pages)
            num_evictable += 0 if node.num_locks else len(node.pages)
            assert not node.is_evictable or self._leaves.holds(node), "an evictable leaf is lost"
        assert len(pages) == self.num_pages
        assert num_evictable == self.num_evictable
        return pages
