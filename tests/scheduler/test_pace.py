"""Who waits how long while a pass is open, in the virtual time of a scripted worker.

The clock is the worker's: steps run one after the other and take what the script says.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from freetoken.scheduler.pace import Crowd, Fairness, Pace
from freetoken.wire.messages import StepMode, StepPlan
from tests.fakes.worker import WorkerScript
from tests.scheduler.drive import Driver, expect

LAYERS = 48
LONG = [1 + i % 200 for i in range(900)]
SCRIPT = {
    "num_pages": 400,
    "max_rows": 24,
    "max_step_tokens": 512,
    "max_pass_tokens": 2000,
    "max_on_demand_tokens": 64,
    "num_layers": LAYERS,
    "layer_ms": 11.0,
    "step_ms": 14.0,
    "token_ms": 2.0,
}


def drive(fairness: Fairness | None = None, **fields: object) -> Driver:
    return Driver(WorkerScript(**{**SCRIPT, **fields}), fairness=fairness)  # type: ignore[arg-type]


def stream(driver: Driver, count: int = 1) -> None:
    """Rows that decode from now on, for as long as any test runs."""
    for i in range(count):
        driver.submit(f"stream{i}", [210 + i], 3000)
    for _ in range(20 if count else 0):
        assert driver.step()


def run_pass(driver: Driver) -> tuple[float, float]:
    """Submit a long prompt and step until it has its first token; begin and end of its pass."""
    begin_s = driver.now_s
    driver.submit("long", LONG, 1)
    while not driver.is_done("long"):
        assert driver.step()
    return begin_s, driver.now_s


def gaps_ms(driver: Driver, request_id: str, begin_s: float, end_s: float) -> list[float]:
    """Between tokens, from the last one before `begin_s` to the first one after `end_s`."""
    times = driver.token_s[request_id]
    return [
        1e3 * (two - one) for one, two in pairwise(times) if two > begin_s and one < end_s + 1e-9
    ]


def parts(driver: Driver) -> list[StepPlan]:
    return [plan for plan in driver.plans if plan.mode is StepMode.PASS]


# ---------------------------------------------------------------- those who decode


@pytest.mark.parametrize("max_stall_ms", [100.0, 250.0, 1000.0])
@pytest.mark.parametrize("step_ms", [1.0, 14.0, 40.0])
@pytest.mark.parametrize("layer_ms", [0.3, 11.0, 45.0])
def test_no_gap_of_a_stream_exceeds_the_stall_limit(
    layer_ms: float, step_ms: float, max_stall_ms: float
) -> None:
    driver = drive(Fairness(max_stall_ms, 0.1), layer_ms=layer_ms, step_ms=step_ms)
    stream(driver)
    begin_s, end_s = run_pass(driver)
    gaps = gaps_ms(driver, "stream0", begin_s, end_s)
    assert max(gaps) <= max_stall_ms + 1e-6
    assert len(parts(driver)) <= LAYERS


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.8])
@pytest.mark.parametrize(("layer_ms", "step_ms"), [(11.0, 14.0), (0.5, 3.0), (45.0, 6.0)])
def test_streams_keep_their_share_of_the_time_and_not_much_more(
    layer_ms: float, step_ms: float, share: float
) -> None:
    driver = drive(Fairness(250.0, share), layer_ms=layer_ms, step_ms=step_ms)
    stream(driver)
    begin_s, end_s = run_pass(driver)
    all_ms = 1e3 * (end_s - begin_s)
    decode_ms = all_ms - LAYERS * layer_ms
    # A step in flight when the prompt came, one part more or less at the end.
    slack_ms = 2 * step_ms + share * 250
    assert decode_ms >= share * all_ms - slack_ms
    needed = max(share * all_ms, step_ms * LAYERS * layer_ms / 100)  # a step each 100 ms at least
    assert decode_ms <= needed + slack_ms


def test_layers_that_are_slower_than_the_first_do_not_break_the_limit() -> None:
    """As in models whose first layers have no experts."""
    driver = drive(layer_ms=1.0)
    stream(driver)
    slow = WorkerScript(**{**SCRIPT, "layer_ms": 55.0})  # type: ignore[arg-type]
    begin_s = driver.now_s
    driver.submit("long", LONG, 1)
    while not driver.is_done("long"):
        if parts(driver) and parts(driver)[-1].layers[1] >= 3:
            driver.script = slow
        assert driver.step()
    assert max(gaps_ms(driver, "stream0", begin_s, driver.now_s)) <= 250


def test_a_layer_longer_than_the_limit_is_a_part_of_its_own() -> None:
    driver = drive(layer_ms=400.0)
    stream(driver)
    begin_s, end_s = run_pass(driver)
    assert {plan.layers[1] - plan.layers[0] for plan in parts(driver)} == {1}
    assert max(gaps_ms(driver, "stream0", begin_s, end_s)) == pytest.approx(414)
    decode_ms = 1e3 * (end_s - begin_s) - LAYERS * 400
    assert decode_ms >= 0.19 * 1e3 * (end_s - begin_s), "several tokens follow each layer"


# ---------------------------------------------------------------- newcomers


@pytest.mark.parametrize("streams", [0, 1])
@pytest.mark.parametrize("late_ms", [1, 60, 200, 333, 400])
def test_a_short_newcomer_is_served_in_the_next_pause(late_ms: int, streams: int) -> None:
    driver = drive()
    stream(driver, streams)
    begin_s = driver.now_s
    driver.submit("long", LONG, 1)
    came_s = None
    while "new" not in driver.deltas or not driver.is_done("new"):
        if came_s is None and driver.now_s >= begin_s + late_ms / 1e3:
            came_s = driver.now_s
            driver.submit("new", [220] * 10, 5)
        assert driver.step()
    assert came_s is not None
    ttft_ms = 1e3 * (driver.token_s["new"][0] - came_s)
    own_ms = 14 + 10 * 2
    assert ttft_ms <= 250 + own_ms
    if late_ms <= 200:
        assert not driver.is_done("long"), "it did not wait for the whole pass"
    assert max(gaps_ms(driver, "new", came_s, driver.now_s)) <= 250


@pytest.mark.parametrize(("threshold", "is_first"), [(1, True), (9, True), (64, True), (0, False)])
@pytest.mark.parametrize("streams", [0, 1])
def test_a_newcomer_of_ten_tokens_is_served_before_the_pass_ends_whatever_the_threshold(
    streams: int, threshold: int, is_first: bool
) -> None:
    """The threshold compares it with a pass of its own, which it cannot have now. Only a worker
    that always passes has it wait."""
    driver = drive(max_on_demand_tokens=threshold)
    stream(driver, streams)
    driver.submit("long", LONG, 1)
    while not parts(driver) or parts(driver)[-1].layers[1] < LAYERS // 4:
        assert driver.step()
    came_s = driver.now_s
    driver.submit("new", [220] * 10, 2)
    while not (driver.is_done("new") and driver.is_done("long")):
        assert driver.step()
    if streams:
        driver.abort("stream0")
    driver.run()
    assert (driver.token_s["new"][0] < driver.token_s["long"][0]) == is_first
    if is_first:
        assert 1e3 * (driver.token_s["new"][0] - came_s) <= 2 * 250 + 14 + 10 * 2
    assert driver.text("new") == expect([220] * 10, 2)
    driver.scheduler.check_idle()


# ---------------------------------------------------------------- the pass itself


@pytest.mark.parametrize("newcomer_tokens", [1, 10, 60])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("streams", [0, 3])
def test_newcomers_delay_a_long_prompt_by_no_more_than_the_stated_bound(
    streams: int, share: float, newcomer_tokens: int
) -> None:
    """Three newcomers wait at any moment."""
    driver = drive(Fairness(250.0, share))
    driver.submit("first", [251] * newcomer_tokens, 1)
    driver.run()
    stream(driver, streams)
    begin_s = driver.now_s
    driver.submit("long", LONG, 1)
    number = 0
    while not driver.is_done("long"):
        while number - sum(driver.is_done(f"new{i}") for i in range(number)) < 3:
            driver.submit(f"new{number}", [number % 250] * newcomer_tokens, 2)
            number += 1
        assert driver.step()
    took_ms = 1e3 * (driver.now_s - begin_s)
    pass_ms, step_ms = LAYERS * 11.0, 14.0
    longest_ms = step_ms + 64 * 2.0
    num_parts = len(parts(driver))
    bound = (2 + share / (1 - share)) * pass_ms + 2 * num_parts * step_ms + 2 * longest_ms
    assert took_ms <= bound
    if streams:
        gaps = gaps_ms(driver, "stream0", begin_s, driver.now_s)
        assert max(gaps) <= 250, "a newcomer's step comes behind a decode step if it is long"
    assert number > 4, "they were served meanwhile"


def test_a_pass_alone_runs_in_long_parts_without_a_pause() -> None:
    driver = drive()
    begin_s, end_s = run_pass(driver)
    assert end_s - begin_s == pytest.approx(LAYERS * 11e-3), "nothing but the pass has run"
    assert all(plan.mode is StepMode.PASS for plan in driver.plans)
    lengths = [plan.layers[1] - plan.layers[0] for plan in driver.plans]
    assert lengths[:2] == [1, 1], "the first ones are there to measure"
    assert max(lengths) * 11 <= 125
    assert len(lengths) <= 10


def test_two_parts_are_in_flight_until_the_last_one() -> None:
    driver = drive()
    driver.submit("long", LONG, 1)
    while driver.plan() is not None:
        pass
    while parts(driver)[-1].layers[1] < LAYERS:
        assert len(driver.in_flight) == 2
        driver.apply()
        driver.plan()


def test_streams_cost_a_pass_nothing_but_their_share() -> None:
    """No matter how fast layers and steps are, pauses are not many."""
    driver = drive(layer_ms=0.5, step_ms=0.5)
    stream(driver)
    run_pass(driver)
    assert len(parts(driver)) <= 8


def test_between_two_passes_there_is_a_turn_for_others() -> None:
    driver = drive(max_pass_tokens=500)
    stream(driver)
    begin_s, end_s = run_pass(driver)
    assert sum(plan.layers[0] == 0 for plan in parts(driver)) == 2
    assert max(gaps_ms(driver, "stream0", begin_s, end_s)) <= 250


# ---------------------------------------------------------------- where there are no passes


def test_chunks_beside_a_stream_are_as_large_as_fits_into_the_stall_limit() -> None:
    driver = drive(max_on_demand_tokens=None)
    stream(driver)
    begin_s, end_s = run_pass(driver)
    chunks = [len(plan.extends[0].token_ids) // 4 for plan in driver.plans if plan.extends]
    assert max(gaps_ms(driver, "stream0", begin_s, end_s)) <= 250
    assert chunks[1:3] == [64, 64], "nothing is known before the first one is back"
    assert set(chunks[3:-1]) == {105}
    alone = drive(max_on_demand_tokens=None)
    run_pass(alone)
    assert [len(plan.extends[0].token_ids) // 4 for plan in alone.plans] == [512, 388]


# ---------------------------------------------------------------- numbers


def test_parts_are_alike_in_length() -> None:
    account = Pace(Fairness()).new_account()
    account.note_part(8, 80.0)
    assert account.part_layers(13, Crowd(decodes=False, newcomers=False)) == 7
    assert account.part_layers(12, Crowd(decodes=False, newcomers=False)) == 12


def test_a_slow_decode_step_leaves_a_pass_a_quarter_of_the_limit() -> None:
    pace = Pace(Fairness(200.0, 0.2))
    pace.settle(pace.charge_step(None, has_decodes=True, num_extended=0), 500.0)
    account = pace.new_account()
    account.note_part(8, 80.0)
    assert account.part_layers(48, Crowd(decodes=True, newcomers=False)) <= 5
    charge = pace.charge_step(account, has_decodes=True, num_extended=0)
    pace.settle(charge, 500.0)
    assert account.part_layers(48, Crowd(decodes=True, newcomers=False)) == 5


def test_what_newcomers_add_is_not_taken_from_the_streams_share() -> None:
    pace = Pace(Fairness(250.0, 0.2))
    account = pace.new_account()
    charge = pace.charge_step(account, has_decodes=True, num_extended=10)
    pace.settle(charge, 300.0)
    assert account.decode_ms == pace.times.decode_ms
    assert account.newcomer_ms == pytest.approx(300.0 - pace.times.decode_ms)
    assert not account.lets_newcomers_in(Crowd(decodes=False, newcomers=True))
    pace.settle(pace.charge_part(account, 4, Crowd(True, False)), 400.0)
    assert account.lets_newcomers_in(Crowd(decodes=False, newcomers=True))
