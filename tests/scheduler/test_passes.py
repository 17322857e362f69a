"""Passes in parts: who is in one, what happens beside it, and how it ends early."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest

from freetoken.scheduler.pace import Fairness
from freetoken.wire.messages import StepMode, StepPlan, unpack_ids
from tests.fakes.worker import WorkerScript
from tests.scheduler.drive import Driver, count_extended, expect

LONG = [1 + i % 50 for i in range(100)]
OTHER = [60 + i % 50 for i in range(80)]
LAYERS = 8


def passing(fairness: Fairness | None = None, **fields: object) -> Driver:
    """A driver of 64 pages of four tokens where more than four tokens pass, through 8 layers of
    50 ms; a step takes 10 ms."""
    values: dict[str, object] = {
        "page_size": 4,
        "num_pages": 64,
        "max_step_tokens": 16,
        "max_on_demand_tokens": 4,
        "max_pass_tokens": 200,
        "num_layers": LAYERS,
        "layer_ms": 50.0,
        "step_ms": 10.0,
        **fields,
    }
    return Driver(WorkerScript(**values), fairness=fairness)  # type: ignore[arg-type]


def parts(plans: list[StepPlan]) -> list[StepPlan]:
    return [plan for plan in plans if plan.mode is StepMode.PASS]


def rows_of(plan: StepPlan) -> list[int]:
    return [extend.row_id for extend in plan.extends]


def take_steps(driver: Driver, count: int) -> None:
    for _ in range(count):
        assert driver.step()


def step_until_open(driver: Driver, at: int = 1) -> None:
    """Until `at` layers of a pass are planned and back."""
    while True:
        assert driver.step()
        planned = parts(driver.plans)
        if planned and planned[-1].layers[1] >= at:
            return


# ---------------------------------------------------------------- parts


def test_the_parts_of_a_pass_cover_its_layers_and_only_the_first_brings_tokens() -> None:
    driver = passing()
    driver.submit("a", LONG, 3)
    driver.run()
    planned = parts(driver.plans)
    bounds = [plan.layers for plan in planned]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == LAYERS
    assert all(one[1] == two[0] for one, two in pairwise(bounds))
    assert [count_extended([plan]) for plan in planned] == [100, *[0] * (len(planned) - 1)]
    assert not any(plan.starts or plan.page_runs for plan in planned[1:])
    assert driver.text("a") == expect(LONG, 3)


def test_rows_decode_between_the_parts_and_their_texts_stay() -> None:
    driver = passing()
    driver.submit("a", [1, 2], 60)
    driver.step()
    driver.submit("b", LONG, 5)
    driver.run()
    modes = [plan.mode for plan in driver.plans]
    first, last = modes.index(StepMode.PASS), len(modes) - 1 - modes[::-1].index(StepMode.PASS)
    between = driver.plans[first:last]
    assert sum(1 for plan in between if plan.mode is StepMode.ON_DEMAND) >= 3
    assert all(len(plan.decode_rows) == 4 for plan in between if plan.mode is StepMode.ON_DEMAND)
    assert driver.text("a") == expect([1, 2], 60)
    assert driver.text("b") == expect(LONG, 5)


def test_several_prompts_share_a_pass_and_nobody_joins_it() -> None:
    driver = passing()
    driver.submit("a", LONG, 3)
    driver.submit("b", OTHER, 3)
    step_until_open(driver)
    driver.submit("c", [9] * 20, 3)
    driver.submit("d", [8] * 20, 3)
    driver.run()
    groups = [len(plan.extends) for plan in parts(driver.plans)]
    change = groups.index(2, 1) if 2 in groups[1:] else 0
    assert change
    firsts = [plan for plan in parts(driver.plans) if plan.layers[0] == 0]
    assert [count_extended([plan]) for plan in firsts] == [180, 40]
    for name, prompt in {"a": LONG, "b": OTHER, "c": [9] * 20, "d": [8] * 20}.items():
        assert driver.text(name) == expect(prompt, 3)


def test_a_prompt_beyond_what_a_pass_takes_has_several() -> None:
    driver = passing(max_pass_tokens=60)
    driver.submit("a", LONG, 3)
    driver.run()
    firsts = [plan for plan in parts(driver.plans) if plan.layers[0] == 0]
    assert [count_extended([plan]) for plan in firsts] == [60, 40]
    assert driver.text("a") == expect(LONG, 3)


def test_what_shares_a_prefix_with_the_open_pass_waits_and_hits_the_tree() -> None:
    driver = passing()
    driver.submit("a", LONG, 3)
    step_until_open(driver)
    driver.submit("b", [*LONG, 7, 7], 3)
    assert driver.extended() == 100
    driver.run()
    assert driver.extended() == 100 + 2
    assert driver.cached("b") == 100
    assert driver.text("b") == expect([*LONG, 7, 7], 3)


# ---------------------------------------------------------------- ends


def test_an_aborted_row_keeps_its_pages_until_the_pass_ends_and_says_nothing() -> None:
    driver = passing()
    driver.submit("a", LONG, 3)
    driver.submit("b", OTHER, 3)
    step_until_open(driver)
    used = driver.gauge("pages_used")
    driver.abort("b")
    while len(driver.in_flight) and parts(driver.plans)[-1].layers[1] < LAYERS:
        assert driver.gauge("pages_used") == used
        assert not any(plan.forget_rows for plan in driver.plans)
        driver.step()
    driver.run()
    assert all(rows_of(plan) == rows_of(driver.plans[0]) for plan in parts(driver.plans))
    assert not driver.text("b")
    assert driver.finish("b") == "abort"
    assert driver.text("a") == expect(LONG, 3)
    driver.scheduler.check_idle()
    since = len(driver.plans)
    driver.submit("again", OTHER, 3)
    driver.run()
    assert driver.extended(since) == 1, "what was computed for it is cached"


def test_a_pass_without_clients_stops_at_the_next_pause() -> None:
    driver = passing()
    driver.submit("a", LONG, 3)
    driver.submit("b", OTHER, 3)
    step_until_open(driver)
    reached = parts(driver.plans)[-1].layers[1]
    assert reached < LAYERS
    driver.abort("a")
    driver.abort("b")
    driver.submit("c", [9] * 20, 3)
    driver.run()
    again = [plan for plan in parts(driver.plans) if plan.layers[0] == 0][1]
    before = driver.plans[: driver.plans.index(again) + 1]
    assert parts(before)[-2].layers[1] == reached, "no part came after the abort"
    assert {*unpack_ids(again.forget_rows)} == {*rows_of(driver.plans[0])}
    assert driver.text("c") == expect([9] * 20, 3)
    driver.scheduler.check_idle()


def test_a_pass_that_stops_while_nothing_is_in_flight_gives_its_pages_back_at_once() -> None:
    driver = passing()
    driver.submit("a", LONG, 3)
    driver.plan()
    driver.apply()
    driver.abort("a")
    assert driver.gauge("pages_used") == 0
    driver.scheduler.check_idle()


@pytest.mark.parametrize("failing", [0, 2, LAYERS])
@pytest.mark.parametrize("has_stream", [True, False])
def test_a_part_that_fails_takes_the_rows_of_its_pass_and_no_other(
    failing: int, has_stream: bool
) -> None:
    """The first part, one in the middle, the last; without a stream another one is behind it."""
    driver = passing()
    if has_stream:
        driver.submit("a", [1, 2], 30)
        take_steps(driver, 3)
    driver.fails = lambda plan: (
        plan.mode is StepMode.PASS
        and (plan.layers[0] <= failing < plan.layers[1] or plan.layers[1] == failing)
    )
    driver.submit("b", LONG, 3)
    driver.submit("c", OTHER, 3)
    while not driver.failed:
        assert driver.step()
    driver.fails = lambda plan: False
    driver.submit("b2", LONG, 3)
    driver.run()
    assert {*driver.failed} == {"b", "c"}
    assert {failed.code for failed in driver.failed.values()} == {"step_failed"}
    if has_stream:
        assert driver.text("a") == expect([1, 2], 30)
    assert driver.text("b2") == expect(LONG, 3)
    driver.scheduler.check_idle()


def test_a_step_that_fails_between_the_parts_leaves_the_pass_alone() -> None:
    driver = passing()
    driver.submit("a", [1, 2], 30)
    take_steps(driver, 3)
    driver.submit("b", LONG, 3)
    step_until_open(driver)
    driver.fails = lambda plan: plan.mode is StepMode.ON_DEMAND
    while not driver.failed:
        assert driver.step()
    assert parts(driver.plans)[-1].layers[1] < LAYERS
    driver.fails = lambda plan: False
    driver.run()
    assert {*driver.failed} == {"a"}
    assert driver.text("b") == expect(LONG, 3)


def test_a_lost_worker_takes_the_open_pass_with_it() -> None:
    driver = passing()
    driver.submit("a", [1, 2], 30)
    driver.submit("b", LONG, 3)
    step_until_open(driver)
    driver.lose_worker()
    driver.submit("c", LONG, 3)
    driver.run()
    assert driver.text("c") == expect(LONG, 3)
    driver.scheduler.check_idle()


# ---------------------------------------------------------------- pages


def scarce(num_pages: int) -> Driver:
    """Pages of a token, slow layers, and a scheduler that has learned to expect short outputs."""
    driver = passing(page_size=1, num_pages=num_pages, max_rows=4, layer_ms=200.0)
    for i in range(64):
        driver.submit(f"short{i}", [200], 1)
        driver.run()
    driver.plans.clear()
    return driver


def test_preemption_never_takes_a_row_of_the_open_pass() -> None:
    """`a` needs a page in every step, and the only younger row is in a pass: it waits for it."""
    driver = scarce(30)
    driver.submit("a", [1], 25)
    take_steps(driver, 3)
    driver.submit("b", [5] * 20, 2)
    step_until_open(driver)
    while parts(driver.plans)[-1].layers[1] < LAYERS:
        assert driver.gauge("preemptions") == 0
        assert driver.step()
    assert driver.gauge("pages_free") == 0
    assert len(driver.text("a")) == 10
    driver.run()
    assert driver.text("a") == expect([1], 25)
    assert driver.text("b") == expect([5] * 20, 2)


def test_pages_of_an_aborted_row_in_a_pass_do_not_hold_up_those_who_decode() -> None:
    """The young decoding row is preempted; the old one does not wait for the end of the pass."""
    driver = scarce(45)
    driver.submit("a", [1], 20)
    driver.submit("young", [2, 3], 20)
    take_steps(driver, 3)
    driver.submit("b", [5] * 15, 2)
    driver.submit("c", [6] * 15, 2)
    step_until_open(driver)
    driver.abort("c")
    while parts(driver.plans)[-1].layers[1] < LAYERS:
        assert driver.step()
    assert driver.gauge("preemptions") > 0
    assert driver.is_done("a") or len(driver.text("a")) > 12
    driver.run()
    assert driver.text("a") == expect([1], 20)
    assert driver.text("young") == expect([2, 3], 20)


# ---------------------------------------------------------------- what is told


def test_a_pass_in_parts_is_one_line_with_all_that_it_cost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = passing()
    driver.model.expert_bytes_per_part = 1000
    driver.submit("z", [1, 2], 60)
    take_steps(driver, 3)
    with caplog.at_level(logging.INFO, "freetoken"):
        driver.submit("a", OTHER, 2)
        driver.run()
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("extend id=a")]
    num_parts = len(parts(driver.plans))
    assert num_parts > 2
    assert len(lines) == 1
    assert "tokens=80 cached=0 path=pass" in lines[0]
    assert f"bytes={1000 * num_parts} " in lines[0]
    assert driver.gauge("passes") == 1
    assert driver.gauge("steps_pass") == num_parts
    assert driver.gauge("step_us_pass") == LAYERS * 50_000
    assert driver.gauge("steps") == len(driver.plans)
