from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from freetoken.scheduler.chunks import Deal, StepLimits, deal, in_pause, share

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


def test_without_passes_every_step_is_on_demand() -> None:
    limits = StepLimits(max_step_tokens=64, max_pass_tokens=100, max_on_demand_tokens=None)
    assert deal([1000], limits) == Deal([64], [0])
    assert deal([], limits) == Deal([], [])


def test_extends_up_to_the_threshold_are_on_demand() -> None:
    assert deal([10, 6], PASSES) == Deal([10, 6], [0, 0])


def test_an_extend_beyond_the_threshold_is_for_a_pass() -> None:
    assert deal([17], PASSES) == Deal([0], [17])
    assert deal([90, 90], PASSES) == Deal([0, 0], [90, 10])
    assert deal([500, 5], PASSES) == Deal([0, 5], [100, 0])


def test_short_extends_beyond_the_threshold_together_are_for_a_pass() -> None:
    assert deal([9, 9], PASSES) == Deal([9, 0], [0, 9])


def test_in_the_pauses_of_a_pass_short_extends_are_on_demand_if_any_are() -> None:
    assert in_pause(StepLimits(512, 2000, 3)) == StepLimits(512, 2000, 64)
    assert in_pause(StepLimits(512, 2000, 100)) == StepLimits(512, 2000, 100)
    assert in_pause(StepLimits(16, 2000, 3)) == StepLimits(16, 2000, 16), "the worker's step"
    for threshold in (0, None):
        assert in_pause(StepLimits(512, 2000, threshold)) == StepLimits(512, 2000, threshold)


def test_a_threshold_of_zero_always_passes() -> None:
    limits = StepLimits(max_step_tokens=64, max_pass_tokens=100, max_on_demand_tokens=0)
    assert deal([1], limits) == Deal([0], [1])
