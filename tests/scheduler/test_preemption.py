"""Scarce pages and rows, and the bounds of the queue: everything finishes, or is told."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from freetoken.wire.messages import (
    Accepted,
    Failed,
)
from tests.fakes.worker import WorkerScript
from tests.scheduler.drive import LONG, Driver, expect, small

# ---------------------------------------------------------------- scarce pages and rows


def short_outputs(driver: Driver) -> None:
    """Let the scheduler learn that outputs are short, so that it admits more than will fit."""
    for i in range(64):
        driver.submit(f"short{i}", [200], 1)
        driver.run()


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 40), (2, 24), (4, 12)])
def test_the_youngest_is_preempted_and_everything_finishes(page_size: int, num_pages: int) -> None:
    driver = small(page_size=page_size, num_pages=num_pages, max_rows=6)
    short_outputs(driver)
    since = len(driver.plans)
    for i in range(6):
        driver.submit(f"r{i}", [i, i + 1], 18, seed=i, temperature=1.0)
    driver.run()
    assert driver.gauge("preemptions") > 0
    for i in range(6):
        assert driver.text(f"r{i}") == expect([i, i + 1], 18, seed=i, temperature=1.0)
    resumed = {s.sampling.seed for p in driver.plans[since:] for s in p.starts if s.num_output}
    assert resumed, "a preempted row goes on where it was"
    assert 0 not in resumed, "the oldest is never preempted"
    driver.scheduler.check_idle()


@pytest.mark.parametrize("seed", [366, 459, 731, *range(20)])
def test_a_row_makes_a_token_before_it_is_preempted_again(seed: int) -> None:
    """So it starts at most twice with the same output; and no text changes. In the first three
    of these lives a row started thrice when whoever was the youngest was preempted."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 1, 2, 4])
    driver = small(
        page_size=page_size,
        num_pages=-(-rng.randint(24, 60) // page_size),
        max_step_tokens=rng.choice([1, 1, 2, 5]),
        max_on_demand_tokens=rng.choice([None, 0, 4]),
    )
    short_outputs(driver)
    since = len(driver.plans)
    prompts = []
    for i in range(rng.randint(4, 12)):
        prompts.append([i] * rng.randint(1, 20))
        driver.submit(f"r{i}", prompts[i], rng.choice([None, 2, 3, 40, 20]), seed=i)
        for _ in range(rng.randint(0, 8)):
            driver.step()
    driver.run()
    starts = Counter(
        (start.sampling.seed, start.num_output) for p in driver.plans[since:] for start in p.starts
    )
    assert max(starts.values()) <= 2
    for i, prompt in enumerate(prompts):
        assert driver.text(f"r{i}") == expect(prompt, driver.accepted[f"r{i}"].max_tokens)
    driver.scheduler.check_idle()


def test_a_preempted_row_finds_its_pages_in_the_tree() -> None:
    driver = small(page_size=1, num_pages=20, max_rows=2, context_tokens=20)
    short_outputs(driver)
    since = len(driver.plans)
    driver.submit("old", [1, 2], 9)
    driver.submit("young", [3, 4], 13)
    driver.run()
    assert driver.gauge("preemptions") == 1
    resumes = [
        extend.cached_len
        for plan in driver.plans[since:]
        for start in plan.starts
        for extend in plan.extends
        if start.num_output and extend.row_id == start.row_id
    ]
    assert len(resumes) == 1
    assert resumes[0] > 0
    assert driver.text("young") == expect([3, 4], 13)


def test_a_row_alone_waits_for_the_page_that_a_copy_still_locks() -> None:
    """Pool of three pages: one row's own, one with the source of its copy, one more to come."""
    driver = small(page_size=3, num_pages=3, max_rows=1, max_step_tokens=1)
    driver.submit("a", [0], 8)
    driver.run()
    driver.submit("b", [0, 2, 0], 6)
    driver.run()
    assert driver.text("b") == expect([0, 2, 0], 6)


def extending_row_preempted() -> Driver:
    """`old` takes a page with each token until `young`, still extending, must leave; none of its
    steps is in flight then."""
    driver = small(page_size=1, num_pages=14, max_rows=3, max_step_tokens=1)
    short_outputs(driver)
    driver.submit("old", [1], 13)
    driver.plan()
    driver.apply()
    driver.submit("young", [2, 3, 4, 5, 6, 7, 8, 9], 2)
    driver.submit("follower", [2, 3, 4, 5, 6, 7, 8, 9], 2)
    while not driver.gauge("preemptions"):
        assert driver.plan() is not None
        driver.apply()
    assert not driver.text("young")
    return driver


def test_an_extending_row_is_preempted_between_its_chunks() -> None:
    driver = extending_row_preempted()
    driver.run()
    assert driver.text("old") == expect([1], 13)
    for name in ("young", "follower"):
        assert driver.text(name) == expect([2, 3, 4, 5, 6, 7, 8, 9], 2)


def test_followers_of_a_preempted_row_do_not_depend_on_it() -> None:
    driver = extending_row_preempted()
    driver.abort("young")
    driver.run()
    assert driver.text("follower") == expect([2, 3, 4, 5, 6, 7, 8, 9], 2)


def test_thirty_two_requests_with_a_long_prefix_all_finish_in_a_small_pool() -> None:
    driver = small(page_size=4, num_pages=40, max_rows=16)
    for i in range(32):
        driver.submit(f"r{i}", [*LONG, i, i], 8)
    driver.run()
    for i in range(32):
        assert driver.text(f"r{i}") == expect([*LONG, i, i], 8)
    assert driver.extended() < 100 + 32 * 20


def test_a_big_request_at_the_head_is_not_overtaken_for_ever() -> None:
    driver = small(page_size=4, num_pages=32, max_rows=8)
    for i in range(4):
        driver.submit(f"small{i}", [i], 40)
    driver.step()
    driver.submit("big", LONG, 8)
    for i in range(30):
        driver.submit(f"late{i}", [100 + i], 2)
    while not driver.is_done("big"):
        assert driver.step()
    assert driver.text("big") == expect(LONG, 8)
    driver.run()


def test_a_lower_priority_value_goes_first_and_the_others_age() -> None:
    driver = small(max_rows=1)
    driver.submit("first", [1], 2)
    driver.submit("batch", [2], 2, priority=1)
    driver.submit("chat", [3], 2, priority=0)
    driver.now_s = 11.0
    driver.submit("late", [4], 2, priority=0)
    order = []
    while driver.step():
        order += [r for r in driver.deltas if driver.is_done(r) and r not in order]
    assert order == ["first", "chat", "batch", "late"]


@pytest.mark.parametrize("priority", [1, 5, 2**31 - 1])
def test_a_request_of_the_worst_priority_is_served_under_a_flood_of_better_ones(
    priority: int,
) -> None:
    """One row, always somebody new who goes first: it is overtaken only by those who come within
    the time that its priority is worth."""
    driver = small(max_rows=1)
    driver.submit("first", [1], 2)
    driver.submit("last", [2], 2, priority=priority)
    bound_s = 10.0 * (min(priority, 60) + 60)
    for i in range(1000):
        driver.now_s = 2.0 * i
        driver.submit(f"flood{i}", [3], 1, priority=-(2**31))
        driver.step()
        if driver.is_done("last"):
            break
    assert driver.is_done("last")
    assert bound_s - 10 < driver.now_s < bound_s + 10
    assert driver.text("last") == expect([2], 2)


# ---------------------------------------------------------------- bounds of the queue


def test_a_full_queue_answers_queue_full_with_a_time_to_retry() -> None:
    driver = Driver(WorkerScript(max_rows=1), max_queued=(2, 1000))
    for i in range(3):
        driver.submit(f"r{i}", [i + 1], 5)
        driver.plan()
    refused = driver.submit("r3", [9], 5)
    assert isinstance(refused, Failed)
    assert refused.code == "queue_full"
    assert refused.retry_after_s is not None
    assert refused.retry_after_s >= 1
    assert "2 requests are waiting, the limit is 2" in refused.message
    driver.run()
    assert isinstance(driver.submit("r4", [9], 5), Accepted)


def test_queued_tokens_are_bounded_too_but_one_prompt_always_has_room() -> None:
    driver = Driver(WorkerScript(max_rows=1), max_queued=(100, 50))
    assert isinstance(driver.submit("r0", [1] * 80, 1), Accepted)
    refused = driver.submit("r1", [2] * 10, 1)
    assert isinstance(refused, Failed)
    assert "80 prompt tokens are waiting, 10 more exceed the limit of 50" in refused.message
    driver.run()
    assert driver.scheduler.num_waiting == 0
