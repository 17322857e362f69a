from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freetoken.scheduler.chunks import Deal, StepLimits, deal, share
from freetoken.wire.messages import StepMode

D, P = StepMode.ON_DEMAND, StepMode.PASS
PASSES = StepLimits(max_step_tokens=64, max_pass_tokens=100, max_on_demand_tokens=16)


@given(st.lists(st.integers(1, 50), max_size=8), st.integers(1, 60))
def test_share_uses_the_whole_budget_and_the_oldest_always_moves_on(
    remaining: list[int], budget: int
) -> None:
    chunks = share(remaining, budget)
    assert sum(chunks) == min(sum(remaining), budget)
    assert all(0 <= chunk <= tokens for chunk, tokens in zip(chunks, remaining, strict=True))
    assert not remaining or chunks[0] > 0


def test_a_short_newcomer_does_not_wait_for_a_long_prompt() -> None:
    assert share([1000, 1000, 10], 64) == [54, 0, 10]


def test_short_rows_leave_the_oldest_half_of_the_budget() -> None:
    assert share([1000] + [8] * 20, 64) == [32] + [8] * 4 + [0] * 16


def test_without_passes_every_step_is_on_demand_with_the_decodes() -> None:
    limits = StepLimits(max_step_tokens=64, max_pass_tokens=100, max_on_demand_tokens=None)
    assert deal([1000], True, D, limits) == Deal(D, [64], True)
    assert deal([], True, D, limits) == Deal(D, [], True)


def test_extends_up_to_the_threshold_ride_with_the_decodes() -> None:
    assert deal([10, 6], True, D, PASSES) == Deal(D, [10, 6], True)


def test_an_extend_beyond_the_threshold_is_a_pass_of_its_own() -> None:
    assert deal([17], True, D, PASSES) == Deal(P, [17], False)
    assert deal([90, 90], True, D, PASSES) == Deal(P, [90, 10], False)


def test_decodes_and_short_extends_get_a_step_between_passes() -> None:
    assert deal([500, 5], True, P, PASSES) == Deal(D, [0, 5], True)
    assert deal([500, 5], True, D, PASSES) == Deal(P, [100, 0], False)
    assert deal([500], False, P, PASSES) == Deal(P, [100], False)


def test_short_extends_that_together_exceed_the_threshold_wait_for_a_pass() -> None:
    assert deal([9, 9], False, D, PASSES) == Deal(P, [0, 9], False)
    assert deal([9, 9], False, P, PASSES) == Deal(D, [9, 0], True)


def test_a_threshold_of_zero_always_passes() -> None:
    limits = StepLimits(max_step_tokens=64, max_pass_tokens=100, max_on_demand_tokens=0)
    assert deal([1], False, D, limits) == Deal(P, [1], False)
    assert deal([1], True, P, limits) == Deal(D, [0], True)
