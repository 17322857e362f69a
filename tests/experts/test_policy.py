from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.experts.policy import SlotPolicy
from freetoken.kernels.slot_order import (
    DECAY_NUMERATOR,
    DECAY_SHIFT,
    KEPT_KEY,
    KEPT_LAYER_SHIFT,
    KEPT_SHIFT,
    MAX_AGE,
    ONE_USE,
    SLOTS_PER_REPLACEMENT,
    decayed,
    num_victims,
    order_key,
)

# A step is the experts of each of three layers.
LAYER = st.lists(st.integers(0, 7), unique=True, max_size=8)
STEPS = st.lists(st.tuples(LAYER, LAYER, LAYER), max_size=30)
MOST = 2**DECAY_SHIFT * ONE_USE // DECAY_NUMERATOR


class NaivePolicy:
    """Remembers every use, and searches for a victim anew each time, by the rules in words."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.step = 1
        self.uses: dict[tuple[int, int], list[int]] = {}
        self.seats: dict[int, tuple[int, int]] = {}
        self.share: list[int] = []
        self.may_take_used = False

    def worth(self, key: tuple[int, int], end: int) -> int:
        """As of the end of step `end`, before it decays."""
        value = 0
        for step in range(1, end + 1):
            value = decayed(value) + ONE_USE * (step in self.uses[key])
        return value

    def resolve(self, layer: int, experts: list[int]) -> tuple[set[int], dict[int, int], set[int]]:
        for expert in experts:
            self.uses.setdefault((layer, expert), []).append(self.step)
        hits = {expert for expert in experts if (layer, expert) in self.seats.values()}
        loads, bypass = {}, set()
        for expert in sorted(set(experts) - hits):
            slot = self.find_victim(layer)
            if slot is None:
                bypass.add(expert)
            else:
                loads[expert] = slot
                self.seats[slot] = layer, expert
        return hits, loads, bypass

    def find_victim(self, layer: int) -> int | None:
        free = [slot for slot in range(self.num_slots) if slot not in self.seats]
        idle = [slot for slot in self.share if self.last_use(slot) < self.step - 1]
        last = [slot for slot in self.seats if self.last_use(slot) == self.step - 1]
        passed = [slot for slot in last if self.seats[slot][0] <= layer]
        before = self.step - 1
        if free:
            return free[0]
        if idle:
            return min(idle, key=lambda slot: self.idle_order(slot, before))
        if passed and self.may_take_used:
            return min(passed, key=lambda slot: self.last_order(slot, before))
        return None

    def last_use(self, slot: int) -> int:
        return self.uses[self.seats[slot]][-1]

    def idle_order(self, slot: int, end: int) -> tuple[int, int, int]:
        return self.worth(self.seats[slot], end), self.last_use(slot), slot

    def last_order(self, slot: int, end: int) -> tuple[int, int, int]:
        key = self.seats[slot]
        return key[0], self.worth(key, end) >> KEPT_SHIFT, slot

    def end_step(self) -> None:
        idle = [slot for slot in self.seats if self.last_use(slot) < self.step]
        idle.sort(key=lambda slot: self.idle_order(slot, self.step))
        share = -(-self.num_slots // SLOTS_PER_REPLACEMENT)
        self.share = idle[:share]
        self.may_take_used = len(idle) < share
        self.step += 1


@settings(deadline=None)
@given(num_slots=st.integers(0, 20), steps=STEPS)
def test_resolve_equals_a_naive_model(num_slots: int, steps: list[tuple[list[int], ...]]) -> None:
    policy, naive = SlotPolicy(num_slots), NaivePolicy(num_slots)
    for step in steps:
        for layer, experts in enumerate(step):
            found = policy.resolve(layer, experts)
            got = set(found.hits), found.loads, set(found.bypass)
            assert got == naive.resolve(layer, experts)
        policy.end_step()
        naive.end_step()


@given(num_slots=st.integers(0, 20), steps=STEPS)
def test_resolve_gives_every_expert_of_a_step_its_own_place(
    num_slots: int, steps: list[tuple[list[int], ...]]
) -> None:
    policy = SlotPolicy(num_slots)
    for step in steps:
        used: set[tuple[int, int]] = set()
        for layer, experts in enumerate(step):
            found = policy.resolve(layer, experts)
            policy.check()
            assert sorted([*found.hits, *found.loads, *found.bypass]) == sorted(experts)
            held = policy.find(layer)
            placed = found.hits | found.loads
            assert {expert: held[expert] for expert in placed} == placed
            used |= {(layer, expert) for expert in placed}
        seats = {(layer, e): s for layer in range(3) for e, s in policy.find(layer).items()}
        assert used <= seats.keys(), "a slot that the step uses was taken from it"
        policy.end_step()
        policy.check()


def run(policy: SlotPolicy, *layers: list[int]) -> int:
    """One step; how many hits."""
    hits = sum(len(policy.resolve(layer, experts).hits) for layer, experts in enumerate(layers))
    policy.end_step()
    return hits


def test_free_slots_are_filled_without_a_limit() -> None:
    policy = SlotPolicy(100)
    assert len(policy.resolve(0, range(90)).loads) == 90


def test_expert_used_often_outlasts_one_used_more_recently() -> None:
    policy = SlotPolicy(2)
    for _ in range(5):
        run(policy, [0])
    run(policy, [1])
    run(policy, [])
    run(policy, [2])
    assert policy.find(0).keys() == {0, 2}


def test_longest_unused_goes_first_among_forgotten_ones() -> None:
    policy = SlotPolicy(2)
    run(policy, [5])
    run(policy, [3])
    for _ in range(500):
        run(policy)
    run(policy, [7])
    assert policy.find(0).keys() == {3, 7}


def test_expert_that_is_not_in_a_slot_keeps_its_priority() -> None:
    policy = SlotPolicy(1)
    for _ in range(3):
        run(policy, [0], [4])
    assert policy.find(0).keys() == {0}
    run(policy, [], [4])
    assert policy.find(1).keys() == {4}
    run(policy, [0])
    run(policy)
    assert policy._priority[1, 4] > policy._priority[0, 0] * 0.9


def test_step_of_more_experts_than_slots_keeps_them_all_when_repeated() -> None:
    policy = SlotPolicy(10)
    wide = [list(range(8)), list(range(8))]
    run(policy, *wide)
    assert [run(policy, *wide) for _ in range(5)] == [10] * 5


def test_slot_of_the_last_step_goes_when_its_layer_has_passed_without_using_it() -> None:
    policy = SlotPolicy(2)
    run(policy, [0], [0])
    assert policy.resolve(0, [1]).loads == {1: 0}
    assert policy.resolve(1, [0]).hits == {0: 1}


def test_slot_of_a_layer_to_come_stays() -> None:
    policy = SlotPolicy(2)
    run(policy, [], [0, 1])
    assert policy.resolve(0, [5]).bypass == (5,)


def test_wide_step_replaces_no_more_than_its_share() -> None:
    policy = SlotPolicy(64)
    run(policy, list(range(64)))
    run(policy, [])
    found = policy.resolve(1, range(40))
    assert len(found.loads) == 64 // SLOTS_PER_REPLACEMENT == 16
    assert found.bypass == tuple(range(16, 40))


@pytest.mark.parametrize(("num_kept", "reach"), [(0, 35), (65, 35), (66, 100), (90, 100)])
def test_slots_of_the_last_step_are_in_reach_where_others_are_few(
    num_kept: int, reach: int
) -> None:
    assert num_victims(num_slots=100, num_free=10, num_kept=num_kept) == reach


def test_find_changes_nothing() -> None:
    policy = SlotPolicy(2)
    run(policy, [0])
    run(policy, [1])
    policy.find(0)
    run(policy)
    run(policy, [2])
    assert policy.find(0).keys() == {1, 2}


def test_check_finds_a_lost_slot() -> None:
    policy = SlotPolicy(2)
    run(policy, [0])
    policy._owner[0] = None
    with pytest.raises(AssertionError, match="lost or held twice"):
        policy.check()


def test_order_keys_do_not_overlap_and_fit_in_32_bits() -> None:
    assert order_key(0, 0, 1) < MAX_AGE < order_key(0, 1, 1)
    assert order_key(0, MOST, 10) < KEPT_KEY == order_key(0, 0, 0)
    assert order_key(3, MOST, 0) < order_key(4, 0, 0)
    assert MOST >> KEPT_SHIFT < 1 << KEPT_LAYER_SHIFT
    assert order_key(1000, MOST, 0) < 2**31 - 1
    assert MOST * DECAY_NUMERATOR + 2**DECAY_SHIFT < 2**31


def test_priority_is_bounded_and_reaches_zero() -> None:
    value = 0
    for _ in range(1000):
        value = decayed(value) + ONE_USE
    assert 0.999 * MOST < value <= MOST
    steps = 0
    while value > 0:
        value, steps = decayed(value), steps + 1
    assert steps < 500
    assert decayed(decayed(decayed(decayed(ONE_USE)))) == pytest.approx(ONE_USE / 2, rel=0.02)
