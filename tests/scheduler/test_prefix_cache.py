"""What requests find in the cache, with the whole scheduler and the fake model."""

from __future__ import annotations

from tests.scheduler.drive import LONG, expect, small


def test_a_repeated_prompt_recomputes_one_token() -> None:
    driver = small()
    driver.submit("a", LONG, 5)
    driver.run()
    since = len(driver.plans)
    driver.submit("b", LONG, 5)
    driver.run()
    assert driver.text("b") == driver.text("a")
    assert driver.extended(since) == 1
    assert driver.cached("b") == 99
    assert driver.cached("a") == 0


def test_the_next_turn_reuses_up_to_the_last_common_token() -> None:
    """The template adds an opener (here 60, 61) only when it generates."""
    driver = small()
    driver.submit("one", [*LONG[:50], 60, 61], 6)
    driver.run()
    answer = driver.text("one")
    driver.submit("two", [*LONG[:50], *answer, 70, 71], 6)
    driver.run()
    assert driver.cached("two") == 50
    driver.submit("three", [*LONG[:50], 60, 61, *answer, 70, 71], 6)
    driver.run()
    assert driver.cached("three") == 52 + 5, "the last token's k/v was never needed"


def test_identical_prompts_together_are_computed_once() -> None:
    driver = small(num_pages=200)
    for i in range(8):
        driver.submit(f"r{i}", LONG, 4, seed=i, temperature=1.0)
    driver.run()
    assert driver.extended() == 100 + 7 * 4, "a hundred tokens are 25 pages; the last is recomputed"
    for i in range(8):
        assert driver.text(f"r{i}") == expect(LONG, 4, seed=i, temperature=1.0)


def test_a_follower_starts_as_soon_as_the_shared_part_is_there() -> None:
    driver = small(num_pages=200, max_step_tokens=8)
    driver.submit("leader", LONG, 4)
    driver.submit("follower", [*LONG[:20], 99], 4)
    driver.run()
    extends = [(e.row_id, e.cached_len) for p in driver.plans for e in p.extends]
    leader_row = extends[0][0]
    first = next(i for i, (row, _) in enumerate(extends) if row != leader_row)
    assert extends[first][1] == 20
    assert first < len(extends) - 3, "the leader is far from done"
    assert driver.text("follower") == expect([*LONG[:20], 99], 4)


def test_followers_go_on_when_their_leader_is_aborted() -> None:
    driver = small(max_step_tokens=8)
    driver.submit("leader", LONG, 4)
    driver.submit("follower", LONG, 4)
    driver.step()
    assert driver.gauge("waiting") == 1
    driver.abort("leader")
    driver.run()
    assert driver.text("follower") == expect(LONG, 4)
    assert driver.gauge("waiting") == 0


def test_different_salts_share_nothing() -> None:
    driver = small()
    driver.submit("a", LONG, 2, salt="x")
    driver.run()
    driver.submit("b", LONG, 2, salt="y")
    driver.run()
    assert driver.cached("b") == 0


def test_a_prompt_that_needs_the_whole_pool_goes_without_the_page_to_copy_from() -> None:
    driver = small(page_size=4, num_pages=4, context_tokens=16)
    driver.submit("a", [1, 2, 3, 4, 5, 6], 1)
    driver.run()
    driver.submit("b", [1, 2, 3, 4, 5, 7, *range(8, 17)], 1)
    driver.run()
    assert driver.cached("b") == 4
    assert driver.text("b") == expect([1, 2, 3, 4, 5, 7, *range(8, 17)], 1)
