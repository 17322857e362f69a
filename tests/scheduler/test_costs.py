"""What waiting requests cost the steps of others, counted in calls, never in time."""

from __future__ import annotations

import gc
import sys
from types import FrameType

import pytest

from freetoken.scheduler.roster import MAX_MOVES
from freetoken.wire.messages import StepPlan
from tests.scheduler.drive import Driver, expect, small

PREFIX = [1 + i % 50 for i in range(160)]


class Calls:
    """Counts the calls of Python and C functions in a block, without those of the collector."""

    def __init__(self) -> None:
        self.count = 0

    def _note(self, _frame: FrameType, event: str, _argument: object) -> None:
        self.count += event in ("call", "c_call")

    def __enter__(self) -> Calls:
        gc.disable()
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()
        self.count -= 1  # setprofile itself


def step(driver: Driver) -> int:
    """One result and one plan, two in flight; the calls that they took."""
    back = driver.in_flight.popleft()
    assert not isinstance(back, int)
    with Calls() as applying:
        driver.scheduler.apply(back, driver.now_s)
    with Calls() as planning:
        plan = driver.scheduler.plan(driver.now_s)
    assert plan is not None
    driver.in_flight.append(driver.model.run(plan))
    return applying.count + planning.count


def running(num_waiting: int, **fields: object) -> Driver:
    """Four rows that decode, two steps in flight, and as many waiting."""
    driver = small(num_pages=200, **fields)
    for i in range(4):
        driver.submit(f"row{i}", [i], 60)
    for _ in range(4):
        assert driver.step()
    driver.plan()
    for i in range(num_waiting):
        driver.submit(f"waiting{i}", [7, i // 50, i % 50], 4)
    return driver


def test_a_step_takes_as_many_calls_with_three_hundred_waiting_as_with_one() -> None:
    one, many = running(1, max_rows=4), running(300, max_rows=4)
    assert many.scheduler.num_waiting == 300
    assert [step(one) for _ in range(20)] == [step(many) for _ in range(20)]


def test_a_step_takes_as_many_calls_when_a_row_is_free_but_pages_are_not() -> None:
    def blocked(num_waiting: int) -> Driver:
        driver = running(0, max_rows=8)
        driver.submit("big", [9] * 720, 4)  # all pages but those that the rows will likely take
        for i in range(num_waiting):
            driver.submit(f"waiting{i}", [7, i // 50, i % 50], 4)
        assert driver.scheduler.num_waiting == num_waiting + 1
        step(driver)
        return driver

    one, many = blocked(0), blocked(300)
    calls = [step(one) for _ in range(20)], [step(many) for _ in range(20)]
    assert many.scheduler.num_waiting == 301, "nobody overtakes the oldest"
    assert calls[0] == calls[1]


def test_a_row_that_decodes_takes_three_calls_a_step_and_seventeen_where_its_page_is_full() -> None:
    """Called for 256 rows between a result and the next plan, each call counts."""

    def calls(num_rows: int) -> list[int]:
        driver = small(num_pages=400, max_rows=64, max_step_tokens=64)
        for i in range(num_rows):
            driver.submit(f"row{i}", [i], 60)
        for _ in range(6):
            assert driver.step()
        driver.plan()
        return [step(driver) for _ in range(12)]  # pages of four tokens

    per_row = [(many - few) / 32 for few, many in zip(calls(4), calls(36), strict=True)]
    assert sorted(per_row)[5] <= 3
    assert max(per_row) <= 17


class Untouchable:
    """Stands for the tokens of a request that nobody may look at."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"{name} of a waiting request was asked for")

    def __len__(self) -> int:
        raise AssertionError("the length of a waiting request was asked for")


def test_planning_looks_at_no_tokens_beyond_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = running(50, max_rows=5, page_size=4)
    requests = driver.scheduler._engine.requests  # type: ignore[union-attr]
    for i in range(2, 50):
        request = requests.get(f"waiting{i}")
        assert request is not None
        monkeypatch.setattr(request, "ids", Untouchable())
    for _ in range(2):
        step(driver)
    assert driver.scheduler.num_waiting == 49, "one was seated, the next has no row"


# ---------------------------------------------------------------- a prefix that many wait for


def followers(count: int) -> Driver:
    """A leader that computes a long prefix, and so many prompts that begin with it."""
    driver = small(num_pages=400, max_rows=8, max_step_tokens=8)
    driver.submit("leader", PREFIX, 2)
    for i in range(count):
        driver.submit(f"follower{i}", [*PREFIX[: 80 + i], 60, i], 2)
    return driver


def looked_at(driver: Driver) -> tuple[int, StepPlan | None]:
    """Waiting requests that a plan compares with the tree."""
    ledger = driver.scheduler._engine.roster.ledger  # type: ignore[union-attr]
    match, seen = ledger.match, []
    ledger.match = lambda request: (seen.append(request), match(request))[1]  # type: ignore
    try:
        plan = driver.plan()
    finally:
        ledger.match = match
    return len(seen), plan


def test_a_plan_looks_at_a_bounded_number_of_requests_with_a_common_prefix() -> None:
    driver = followers(70)
    num_plans = 0
    while driver.scheduler.num_running < 8:
        seen, plan = looked_at(driver)
        assert seen <= MAX_MOVES + 8
        num_plans += plan is not None
        if plan is None or len(driver.in_flight) == 2:
            driver.apply()
    assert num_plans > 70 // MAX_MOVES, "not all at once"
    driver.run()
    for i in range(70):
        assert driver.text(f"follower{i}") == expect([*PREFIX[: 80 + i], 60, i], 2)


def test_many_followers_return_when_their_leader_is_aborted_and_some_of_them_too() -> None:
    driver = followers(70)
    for _ in range(8):
        driver.step()
    driver.abort("leader")
    for i in range(0, 70, 2):
        driver.abort(f"follower{i}")
    driver.run()
    for i in range(1, 70, 2):
        assert driver.text(f"follower{i}") == expect([*PREFIX[: 80 + i], 60, i], 2)
    assert driver.scheduler.num_waiting == 0
    driver.scheduler.check_idle()


def test_headroom_is_never_more_than_its_bound() -> None:
    driver = running(0, max_rows=4)
    roster = driver.scheduler._engine.roster  # type: ignore[union-attr]
    for _ in range(40):
        driver.step()
        counted = roster.likely.headroom_pages(roster.running(), 4)
        assert counted <= roster.likely.most_pages(roster.num_running, 4)
