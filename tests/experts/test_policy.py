from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.experts.policy import RecencyPolicy

STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 7), unique=True, max_size=8)),
    max_size=60,
)


class NaivePolicy:
    """Remembers the time of each expert's last use and searches for the oldest."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.time = 0
        self.used_at: dict[tuple[int, int], int] = {}

    def resolve(self, layer: int, experts: list[int]) -> tuple[set[int], set[int], set[int]]:
        hits = {e for e in experts if (layer, e) in self.used_at}
        for expert in experts:
            if expert in hits:
                self.used_at[layer, expert] = self.time = self.time + 1
        loads, bypass = set(), set()
        for expert in experts:
            if expert in hits:
                continue
            if len(self.used_at) >= self.num_slots:
                others = [k for k in self.used_at if k[0] != layer or k[1] not in experts]
                if not others:
                    bypass.add(expert)
                    continue
                del self.used_at[min(others, key=self.used_at.__getitem__)]
            loads.add(expert)
            self.used_at[layer, expert] = self.time = self.time + 1
        return hits, loads, bypass


@given(num_slots=st.integers(0, 12), steps=STEPS)
def test_resolve_equals_a_naive_least_recently_used_model(
    num_slots: int, steps: list[tuple[int, list[int]]]
) -> None:
    policy, naive = RecencyPolicy(num_slots), NaivePolicy(num_slots)
    for layer, experts in steps:
        found = policy.resolve(layer, experts)
        got = set(found.hits), set(found.loads), set(found.bypass)
        assert got == naive.resolve(layer, experts)
        policy.check()
        held = policy.find(layer)
        assert {e: held[e] for e in found.hits} == found.hits
        assert {e: held[e] for e in found.loads} == found.loads


@given(num_slots=st.integers(1, 12), steps=STEPS)
def test_resolve_gives_every_expert_of_a_step_its_own_place(
    num_slots: int, steps: list[tuple[int, list[int]]]
) -> None:
    policy = RecencyPolicy(num_slots)
    for layer, experts in steps:
        found = policy.resolve(layer, experts)
        slots = [*found.hits.values(), *found.loads.values()]
        assert len(set(slots)) == len(slots)
        assert sorted([*found.hits, *found.loads, *found.bypass]) == sorted(experts)


def test_resolve_evicts_the_expert_used_longest_ago() -> None:
    policy = RecencyPolicy(2)
    first = policy.resolve(0, [0]).loads[0]
    policy.resolve(0, [1])
    policy.resolve(0, [1])
    assert policy.resolve(1, [0]).loads == {0: first}
    assert policy.find(0).keys() == {1}


def test_find_changes_no_recency() -> None:
    policy = RecencyPolicy(2)
    policy.resolve(0, [0])
    policy.resolve(0, [1])
    policy.find(0)
    policy.resolve(0, [2])
    assert policy.find(0).keys() == {1, 2}


def test_step_wider_than_the_slots_bypasses_the_rest() -> None:
    found = RecencyPolicy(3).resolve(0, [0, 1, 2, 3, 4])
    assert len(found.loads) == 3
    assert found.bypass == (3, 4)


def test_check_finds_a_lost_slot() -> None:
    policy = RecencyPolicy(2)
    policy._free.pop()
    with pytest.raises(AssertionError, match="lost or held twice"):
        policy.check()
