"""Steps as the threshold sees them."""

from __future__ import annotations

import pytest

from freetoken.wire.messages import Extend, StepMode, StepStats, pack_ids
from freetoken.worker.observe import StepObserver
from tests.worker.plans import decode_plan, make_plan, start_plan

NUM_LAYERS = 4


class Noted:
    tokens = 33

    def __init__(self):
        self.seen = []

    def observe(self, num_tokens, distinct, *, is_pass, step_s, num_bytes):
        self.seen.append((num_tokens, distinct, is_pass, pytest.approx(step_s), num_bytes))


def stats(milliseconds, distinct, num_bytes):
    return StepStats(step_us=milliseconds * 1000, distinct_experts=distinct, expert_bytes=num_bytes)


def test_an_on_demand_step_counts_its_extends_and_its_decode_rows():
    noted = Noted()
    observer = StepObserver(noted, NUM_LAYERS)
    assert observer.max_on_demand_tokens == 33
    extends = (Extend(0, 5, pack_ids([1, 2, 3]), True),)
    observer.note(decode_plan({1: 3, 2: 4}, extends=extends), stats(2, 8, 100))
    assert noted.seen == [(5, 8, False, 0.002, 100)]


def test_a_pass_counts_once_without_what_ran_between_its_parts():
    noted = Noted()
    observer = StepObserver(noted, NUM_LAYERS)
    first = start_plan(0, [1] * 9, 0, mode=StepMode.PASS, layers=(0, 1))
    rest = (Extend(0, 0, b"", True),)
    middle = make_plan(mode=StepMode.PASS, layers=(1, 3), extends=rest)
    last = make_plan(mode=StepMode.PASS, layers=(3, 4), extends=rest)
    observer.note(first, stats(10, 4, 1000))
    observer.note(decode_plan({1: 3}), stats(1, 2, 3))
    observer.note(middle, stats(20, 5, 2000))
    observer.note(last, stats(30, 6, 3000))
    whole = start_plan(0, [1] * 7, 0, mode=StepMode.PASS)
    observer.note(whole, stats(5, 1, 10))
    assert noted.seen == [
        (1, 2, False, 0.001, 3),
        (9, 15, True, 0.06, 6000),
        (7, 1, True, 0.005, 10),
    ]
