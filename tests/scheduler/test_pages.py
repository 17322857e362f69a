from __future__ import annotations

from array import array

import pytest

from freetoken.scheduler.pages import PagePool


def test_taken_pages_are_distinct_and_come_back_in_any_order() -> None:
    pool = PagePool(5)
    first, second = pool.take(2), pool.take(3)
    assert sorted([*first, *second]) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    pool.give(second[1:])
    pool.give(first)
    assert pool.num_free == 4
    pool.check(second[:1])


def test_take_of_nothing_takes_nothing() -> None:
    pool = PagePool(3)
    assert pool.take(0) == array("i")
    assert pool.num_free == 3


def test_more_pages_than_free_are_never_given() -> None:
    pool = PagePool(3)
    pool.take(2)
    with pytest.raises(AssertionError, match="2 pages wanted, 1 free"):
        pool.take(2)


@pytest.mark.parametrize("held", [[], [2, 1], [2, 2], [3]])
def test_check_notices_a_lost_page_and_one_with_two_holders(held: list[int]) -> None:
    pool = PagePool(4)
    assert pool.take(1)[0] == 0
    pool.take(1)
    with pytest.raises(AssertionError, match="lost or has two holders"):
        pool.check(held)
