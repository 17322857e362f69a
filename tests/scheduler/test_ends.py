"""Aborts, failed steps and lost workers: an end for everyone, and nothing left behind."""

from __future__ import annotations

import msgspec
import pytest

from freetoken.wire.messages import (
    Failed,
    StepResult,
)
from tests.scheduler.drive import LONG, expect, small


@pytest.mark.parametrize("steps", range(9))
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_an_abort_at_any_moment_gives_everything_back(steps: int, ahead: int) -> None:
    driver = small(max_step_tokens=40)
    driver.submit("other", [9, 8, 7], 12)
    driver.submit("a", LONG, 3)
    for _ in range(steps):
        driver.step()
    for _ in range(ahead):
        driver.plan()
    was_done = driver.is_done("a")
    driver.abort("a")
    assert was_done or driver.finish("a") == "abort"
    driver.abort("a")
    driver.run()
    assert driver.text("other") == expect([9, 8, 7], 12)
    driver.scheduler.check_idle()
    driver.submit("again", [*LONG, 3], 3)
    driver.run()
    assert driver.text("again") == expect([*LONG, 3], 3)


def test_an_api_cannot_abort_what_belongs_to_another() -> None:
    driver = small()
    driver.submit("a", [1], 3, api=b"one")
    driver.abort("a", api=b"two")
    driver.run()
    assert driver.finish("a") == "length"


def test_a_failed_step_fails_its_rows_and_keeps_their_pages_out_of_the_cache() -> None:
    driver = small(max_step_tokens=40)
    driver.submit("a", LONG, 3)
    driver.plan(fails=True)
    driver.submit("later", [9, 8], 3)
    driver.apply()
    assert driver.failed["a"].code == "step_failed"
    driver.run()
    assert driver.text("later") == expect([9, 8], 3)
    driver.submit("again", LONG, 3)
    driver.run()
    assert driver.cached("again") == 0
    assert driver.text("again") == expect(LONG, 3)
    driver.scheduler.check_idle()


@pytest.mark.parametrize("page_size", [1, 4])
def test_rows_of_a_failed_step_are_void_in_the_next_one(page_size: int) -> None:
    """What the next step says was computed for them rests on k/v that was never written."""
    driver = small(page_size=page_size)
    driver.submit("a", [1, 2], 9)
    driver.plan()
    driver.apply()
    driver.plan(fails=True)
    driver.plan()
    driver.apply()
    assert driver.failed["a"].code == "step_failed"
    assert driver.gauge("pages_used") > 0
    text = driver.text("a")
    driver.run()
    assert driver.text("a") == text
    driver.scheduler.check_idle()
    driver.submit("b", [1, 2, *expect([1, 2], 9)], 4)
    driver.run()
    assert driver.text("b") == expect([1, 2, *expect([1, 2], 9)], 4)


def test_a_result_that_does_not_match_its_plan_fails_the_step() -> None:
    driver = small()
    driver.submit("a", [1, 2], 9)
    driver.plan()
    result = driver.in_flight[0]
    assert isinstance(result, StepResult)
    driver.in_flight[0] = msgspec.structs.replace(result, row_ids=b"\7\0\0\0")
    driver.apply()
    assert driver.failed["a"].code == "step_failed"
    driver.submit("b", [1, 2], 2)
    driver.run()
    assert driver.text("b") == expect([1, 2], 2)


def test_results_of_other_steps_have_no_effect() -> None:
    driver = small()
    driver.submit("a", [1, 2], 2)
    driver.plan()
    result = driver.in_flight[0]
    assert isinstance(result, StepResult)
    stale = msgspec.structs.replace(result, step_id=77)
    assert driver.scheduler.apply(stale, 0.0) is None
    assert driver.scheduler.fail_step(77, "late", 0.0) is None
    driver.run()
    assert driver.scheduler.apply(stale, 0.0) is None
    assert driver.text("a") == expect([1, 2], 2)


@pytest.mark.parametrize("steps", range(9))
@pytest.mark.parametrize("threshold", [None, 4])
def test_a_result_that_is_lost_at_any_moment_changes_no_text(
    steps: int, threshold: int | None
) -> None:
    driver = small(max_step_tokens=40, max_on_demand_tokens=threshold, page_size=3)
    driver.submit("a", LONG, 5, temperature=1.0)
    driver.submit("b", [9, 8, 7], 5)
    for _ in range(steps):
        driver.step()
    while driver.plan():
        pass
    if driver.in_flight:
        driver.lose_result()
    driver.run()
    assert driver.text("a") == expect(LONG, 5, temperature=1.0)
    assert driver.text("b") == expect([9, 8, 7], 5)
    driver.scheduler.check_idle()


def test_a_lost_worker_fails_what_is_open_and_the_next_one_starts_clean() -> None:
    driver = small()
    driver.submit("running", LONG, 9)
    driver.step()
    driver.submit("waiting", [4], 2)
    failed = driver.lose_worker()
    assert [m.request_id for _, m in failed] == ["running", "waiting"]
    assert {m.code for _, m in failed} == {"engine_unavailable"}
    assert all(m.retry_after_s for _, m in failed)
    driver.submit("b", LONG, 3)
    driver.run()
    assert driver.cached("b") == 0
    assert driver.text("b") == expect(LONG, 3)


def test_without_a_worker_requests_are_told_to_come_back() -> None:
    driver = small()
    driver.scheduler.detach("loading again", 0.0)
    answer = driver.submit("a", [1], 1)
    assert isinstance(answer, Failed)
    assert answer.code == "engine_unavailable"
    assert "loading again" in answer.message
    assert answer.retry_after_s is not None
    assert driver.scheduler.plan(0.0) is None


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("page_size", [3, 4])
def test_who_only_decodes_beside_an_extend_that_fails_goes_on(page_size: int, ahead: int) -> None:
    """As after a preemption: its text and random stream are those of an undisturbed run."""
    driver = small(page_size=page_size, max_step_tokens=40)
    driver.submit("b", [1, 2, 3], 9, temperature=1.0)
    driver.plan()
    driver.apply()
    driver.submit("a", LONG, 3)
    driver.plan(fails=True)
    for _ in range(ahead):
        driver.plan()
    driver.apply()
    assert driver.failed["a"].code == "step_failed"
    driver.run()
    assert "b" not in driver.failed
    assert driver.text("b") == expect([1, 2, 3], 9, temperature=1.0)
    driver.scheduler.check_idle()


def test_who_goes_on_after_a_failed_step_can_be_aborted_at_once() -> None:
    driver = small(max_step_tokens=40)
    driver.submit("b", [1, 2, 3], 9)
    driver.plan()
    driver.apply()
    driver.submit("a", LONG, 3)
    driver.plan(fails=True)
    driver.plan()
    driver.apply()
    driver.abort("b")
    driver.run()
    assert driver.finish("b") == "abort"
    driver.scheduler.check_idle()


def test_an_aborted_row_of_a_failed_step_leaves_nothing_in_the_cache() -> None:
    """The next step counts k/v of it as computed, which rest on those that were never written."""
    driver = small(max_step_tokens=40)
    driver.submit("a", LONG, 3)
    driver.plan(fails=True)
    driver.plan()
    driver.abort("a")
    driver.run()
    driver.submit("again", LONG, 3)
    driver.run()
    assert driver.cached("again") == 0
    assert driver.text("again") == expect(LONG, 3)
