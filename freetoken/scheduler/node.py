"""A node of the radix tree: a run of pages and the tokens they hold. Data only; see radix.py."""

from __future__ import annotations

from array import array
from itertools import count, pairwise

TOKEN_BYTES = 4

_uids = count()


class Node:
    """`pages` hold the k/v of the tokens in `key`, after those of all ancestors.

    `child_keys[i]` are the first page's bytes of `children[i]`, sorted. A node without parent is a
    root, or gone. `used_at` is the tree's clock when the node was last unlocked.
    """

    __slots__ = (
        "child_keys",
        "children",
        "key",
        "num_locks",
        "pages",
        "parent",
        "salt",
        "uid",
        "used_at",
    )

    def __init__(
        self, key: bytearray, pages: array[int], parent: Node | None, salt: str | None = None
    ) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent
        self.salt = salt
        self.child_keys: list[bytes] = []
        self.children: list[Node] = []
        self.num_locks = 0
        self.used_at = 0
        self.uid = next(_uids)

    @property
    def is_evictable(self) -> bool:
        return not self.children and not self.num_locks and self.parent is not None

    def check(self, page_size: int) -> None:
        """Assert what holds for this node and its children."""
        page_bytes = page_size * TOKEN_BYTES
        assert len(self.pages) == -(-len(self.key) // page_bytes)
        assert self.parent is None or self.pages, "a node without pages"
        assert not self.children or len(self.key) % page_bytes == 0, "a partial page inside"
        assert [bytes(child.key[:page_bytes]) for child in self.children] == self.child_keys
        assert all(a < b for a, b in pairwise(self.child_keys))
        assert self.num_locks >= sum(child.num_locks for child in self.children)
        assert all(child.parent is self for child in self.children)


def common_bytes(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """Length of the common prefix, in bytes. Halving with slice comparisons, and the last few as
    numbers: no Python loop over tokens."""
    same, differ = 0, min(len(a), len(b))
    if a[:differ] == b[:differ]:
        return differ
    while differ - same > 64:
        middle = (same + differ) // 2
        if a[same:middle] == b[same:middle]:
            same = middle
        else:
            differ = middle
    unlike = int.from_bytes(a[same:differ], "big") ^ int.from_bytes(b[same:differ], "big")
    return differ - (unlike.bit_length() + 7) // 8
