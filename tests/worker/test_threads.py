"""Narrow steps use as many threads as pay off, wide ones all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from freetoken.worker.threads import NARROW_TOKENS, StepThreads


@pytest.fixture(autouse=True)
def _threads_as_they_were() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def calibrated(num_threads: int, seconds: Callable[[int], float]) -> tuple[StepThreads, int]:
    """Threads after a calibration on a machine where a step takes `seconds(threads)`."""
    threads, num_steps = StepThreads(num_threads), 0

    def time_step_s() -> float:
        nonlocal num_steps
        num_steps += 1
        threads.use_for(1, 0.0)
        return seconds(torch.get_num_threads())

    threads.calibrate(time_step_s)
    return threads, num_steps


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (lambda count: 1.0 / count, 6),
        (lambda count: float(count), 1),
        (lambda count: abs(count - 4) + 1.0, 4),
        (lambda count: 1.0 - 0.005 * count, 1),  # not worth the trouble
    ],
)
def test_calibration_finds_the_count_that_pays_off(
    seconds: Callable[[int], float], expected: int
) -> None:
    threads, num_steps = calibrated(6, seconds)
    assert threads.num_narrow == expected
    assert num_steps == threads.num_calibration_steps == 3 * len([1, 2, 4, 6])


def test_wide_steps_use_all_threads_and_narrow_ones_the_calibrated_count() -> None:
    threads, _ = calibrated(2, float)
    for num_tokens, expected in ((1, 1), (NARROW_TOKENS, 1), (NARROW_TOKENS + 1, 2), (3, 1)):
        threads.use_for(num_tokens, 0.0)
        assert torch.get_num_threads() == expected


def test_a_single_thread_needs_no_choice() -> None:
    threads, _ = calibrated(1, float)
    assert threads.num_narrow == threads.num_wide == 1


def run_steps(threads: StepThreads, step_s: float, count: int, now_s: float) -> list[int]:
    """The thread counts of `count` narrow steps, each `step_s` long, beginning at `now_s`."""
    counts = []
    for _ in range(count):
        threads.use_for(1, now_s)
        counts.append(torch.get_num_threads())
        now_s += step_s
        threads.note(1, step_s, now_s)
    return counts


def test_slow_steps_mean_fewer_threads_for_a_while_and_longer_if_it_goes_on() -> None:
    threads = StepThreads(4)
    assert run_steps(threads, 0.02, 3, 0.0) == [4, 4, 4]
    assert run_steps(threads, 0.4, 4, 1.0) == [4, 4, 4, 2]
    assert run_steps(threads, 0.03, 2, 6.0) == [2, 2]
    assert run_steps(threads, 0.4, 4, 7.3) == [4, 4, 4, 2]  # 5 s are over, but nothing has changed
    assert run_steps(threads, 0.03, 1, 17.0) == [2]
    assert run_steps(threads, 0.03, 1, 19.0) == [4]


def test_a_single_slow_step_or_a_wide_one_changes_nothing() -> None:
    threads = StepThreads(2)
    for step_s in (0.02, 0.4, 0.4, 0.02, 0.4, 0.4):
        assert run_steps(threads, step_s, 1, 0.0) == [2]
    for _ in range(5):
        assert not threads.note(NARROW_TOKENS + 1, 9.0, 1.0)
    assert threads.num_narrow == 2


def test_one_thread_is_the_least() -> None:
    threads = StepThreads(2)
    run_steps(threads, 0.02, 1, 0.0)
    assert run_steps(threads, 0.4, 9, 1.0) == [2, 2, 2, 1, 1, 1, 1, 1, 1]
