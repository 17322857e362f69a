"""The tree against a naive model that remembers what every page holds."""

from __future__ import annotations

import random

import pytest

from freetoken.scheduler.node import TOKEN_BYTES, Node, common_bytes
from freetoken.scheduler.pages import PagePool
from freetoken.scheduler.radix import RadixTree
from freetoken.wire.messages import pack_ids


class Books:
    """Tree, pool and, per page, the tokens from the root to its end that were stored in it."""

    def __init__(self, page_size: int, num_pages: int) -> None:
        self.size = page_size
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(page_size, self.pool)
        self.content: dict[int, tuple[str | None, list[int]]] = {}

    def absorb(self, tokens: list[int], salt: str | None = None) -> None:
        """What a row does that ends with `tokens` computed."""
        node, cached = self.lock(tokens, salt)
        needed = -(-len(tokens) // self.size) - cached // self.size
        self.tree.evict(needed - self.pool.num_free)
        pages = self.pool.take(needed)
        for i, page in enumerate(pages, cached // self.size):
            self.content[page] = (salt, tokens[: (i + 1) * self.size])
        self.tree.absorb(node, pack_ids(tokens[cached // self.size * self.size :]), pages)
        self.tree.unlock(node)
        self.check()

    def lock(self, tokens: list[int], salt: str | None = None) -> tuple[Node, int]:
        """The locked whole pages of `tokens`, and the length of the match."""
        match = self.tree.match(pack_ids(tokens), salt)
        node = self.tree.lock_match(match)
        length = match.num_pages * self.size + match.partial
        path = self.tree.path_pages(node)
        assert len(path) == match.num_pages
        for i, page in enumerate(path, 1):
            assert self.content[page] == (salt, tokens[: i * self.size])
        if match.partial:
            assert match.child is not None
            found, held = self.content[match.child.pages[0]]
            assert found == salt
            assert held[:length] == tokens[:length]
        return node, length

    def cached(self, tokens: list[int], salt: str | None = None) -> int:
        node, length = self.lock(tokens, salt)
        self.tree.unlock(node)
        return length

    def check(self) -> None:
        self.pool.check(self.tree.check())


def common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_the_match_is_exact_to_the_token(page_size: int) -> None:
    rng = random.Random(page_size)
    books = Books(page_size, 5000)
    stored: list[list[int]] = []
    for _ in range(150):
        base = rng.choice(stored)[: rng.randint(0, 60)] if stored and rng.random() < 0.7 else []
        tokens = base + rng.choices(range(2), k=rng.randint(1, 40))
        assert books.cached(tokens) == max((common(tokens, old) for old in stored), default=0)
        books.absorb(tokens)
        stored.append(tokens)
        assert books.cached(tokens) == len(tokens)
        assert books.cached([*tokens, 7]) >= len(tokens)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_full_pool_evicts_and_what_is_left_is_still_right(page_size: int) -> None:
    rng = random.Random(page_size)
    books = Books(page_size, max(8, 90 // page_size))
    stored: list[list[int]] = []
    hits = 0
    for _ in range(400):
        base = rng.choice(stored[-8:]) if stored and rng.random() < 0.7 else []
        tokens = base[: rng.randint(0, 50)] + rng.choices(range(3), k=rng.randint(1, 20))
        length = books.cached(tokens)
        assert length <= max((common(tokens, old) for old in stored), default=0)
        hits += length > 0
        books.absorb(tokens)
        assert books.cached(tokens) == len(tokens), "the newest goes last"
        stored.append(tokens)
    assert hits > 50
    assert books.pool.num_free < books.pool.num_pages // 2
    books.tree.evict(10**6)
    assert books.pool.num_free == books.pool.num_pages
    assert not list(books.tree.nodes())


def test_salts_do_not_share() -> None:
    books = Books(4, 20)
    books.absorb([1, 2, 3, 4, 5], salt="a")
    assert books.cached([1, 2, 3, 4, 5], salt="a") == 5
    assert books.cached([1, 2, 3, 4, 5], salt="b") == 0
    assert books.cached([1, 2, 3, 4, 5]) == 0
    roots = [node for node in books.tree.nodes() if node.parent is None]
    assert [root.salt for root in roots] == ["a"], "empty roots are dropped"


def test_evict_never_frees_a_locked_page() -> None:
    books = Books(2, 10)
    books.absorb([1, 2, 3, 4, 5, 6])
    node, _ = books.lock([1, 2, 3, 4])
    books.tree.evict(10)
    books.check()
    assert books.tree.num_pages == 2
    assert books.tree.num_evictable == 0
    books.tree.unlock(node)
    books.tree.evict(10)
    assert books.pool.num_free == 10


def test_the_least_recently_used_leaf_is_evicted_first_and_from_its_end() -> None:
    books = Books(2, 12)
    books.absorb([1, 1, 1, 1, 1, 1])
    books.absorb([2, 2, 2, 2])
    assert books.cached([1, 1, 1, 1, 1, 1]) == 6
    for left in (1, 0):
        books.tree.evict(1)
        assert books.tree.match(pack_ids([2, 2, 2, 2]), None).num_pages == left
        books.check()
    assert books.cached([1, 1, 1, 1, 1, 1]) == 6


def test_a_longer_page_replaces_the_partial_one_that_begins_it() -> None:
    books = Books(4, 10)
    books.absorb([1, 2, 3, 4, 5, 6])
    books.absorb([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert books.tree.num_pages == 3
    assert books.cached([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 9


def test_what_the_tree_has_already_goes_back_to_the_pool() -> None:
    books = Books(4, 10)
    books.absorb([1, 2, 3, 4, 5, 6, 7])
    root = books.tree.lock_match(books.tree.match(b"", None))
    books.tree.absorb(root, pack_ids([1, 2, 3, 4, 5, 6]), books.pool.take(2))
    books.tree.unlock(root)
    books.check()
    assert books.tree.num_pages == 2


def test_a_running_row_grows_its_own_leaf_and_leaves_a_shared_one_alone() -> None:
    books = Books(2, 10)
    books.absorb([1, 2])
    mine, _ = books.lock([1, 2])
    grown = books.tree.grow(mine, pack_ids([3, 4]), books.pool.take(1))
    assert grown is mine
    match = books.tree.match(pack_ids([1, 2, 3, 4]), None)
    theirs = books.tree.lock_match(match)
    assert theirs is mine
    child = books.tree.grow(mine, pack_ids([5, 6]), books.pool.take(1))
    assert child is not None
    assert child is not mine
    books.check()
    assert books.tree.grow(theirs, pack_ids([5, 6]), books.pool.take(1)[:0]) is None
    books.tree.unlock(theirs)
    books.tree.unlock(child)
    assert books.tree.num_evictable == books.tree.num_pages == 3


def test_a_split_keeps_the_locks_of_both_halves() -> None:
    books = Books(2, 10)
    books.absorb([1, 2, 3, 4, 5, 6])
    long, _ = books.lock([1, 2, 3, 4, 5, 6])
    short, _ = books.lock([1, 2, 9, 9])
    books.check()
    assert books.tree.path_pages(short) == books.tree.path_pages(long)[:1]
    books.tree.unlock(long)
    books.tree.evict(10)
    assert books.tree.num_pages == 1
    books.tree.unlock(short)
    books.check()


def test_stale_entries_of_the_eviction_order_stay_bounded() -> None:
    books = Books(1, 100)
    for i in range(5):
        books.absorb([i, i, i])
    for i in range(10_000):
        books.cached([i % 5] * 3)
    assert len(books.tree._leaves._heap) <= 64 + 4 * 5 + 1
    books.check()


def test_a_prompt_of_a_hundred_thousand_tokens_matches_up_to_its_last_token() -> None:
    rng = random.Random(0)
    books = Books(16, 8192)
    tokens = [rng.randrange(50_000) for _ in range(100_000)]
    pages = books.pool.take(6250)
    root = books.tree.lock_match(books.tree.match(b"", None))
    ids = pack_ids(tokens)
    books.tree.absorb(root, ids, pages)
    books.tree.unlock(root)
    probe = ids[:-TOKEN_BYTES] + b"\xff" * TOKEN_BYTES
    match = books.tree.match(probe, None)
    assert (match.num_pages, match.partial) == (6249, 15)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 129, 1000])
def test_the_common_beginning_is_found_wherever_it_ends(length: int) -> None:
    one = random.Random(length).randbytes(length)
    for at in range(length):
        other = bytearray(one + b"more")
        other[at] ^= 1 << at % 8
        assert common_bytes(one, other) == common_bytes(other, one) == at
        assert common_bytes(one, one[:at]) == at
    assert common_bytes(one, one + b"more") == length
