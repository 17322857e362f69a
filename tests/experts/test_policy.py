from __future__ import annotations

import math

import pytest
from hypothesis import given
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
    decayed,
    max_replaced,
    order_key,
)

# A step is the experts of each of three layers.
LAYER = st.lists(st.integers(0, 7), unique=True, max_size=8)
STEPS = st.lists(st.tuples(LAYER, LAYER, LAYER), max_size=30)
MOST = 2**DECAY_SHIFT * ONE_USE // DECAY_NUMERATOR


class NaivePolicy:
    """The rules as experts/policy.py tells them, searched for anew at every look-up."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.step = 1
        self.uses: dict[tuple[int, int], list[int]] = {}
        self.seats: dict[int, tuple[int, int]] = {}
        self.left_to_replace = 0

    def worth(self, key: tuple[int, int], end: int) -> float:
        keep = 1 - DECAY_NUMERATOR / 2**DECAY_SHIFT
        return sum(keep ** (end - step) for step in self.uses.get(key, []) if step <= end)

    def last_use(self, key: tuple[int, int]) -> int:
        return self.uses[key][-1]

    def resolve(self, layer: int, experts: list[int]) -> tuple[set[int], set[int], set[int]]:
        for expert in experts:
            self.uses.setdefault((layer, expert), []).append(self.step)
        hits = {e for e in experts if (layer, e) in self.seats.values()}
        loads, bypass = set(), set()
        for expert in sorted(set(experts) - hits):
            slot = self.victim(layer)
            if slot is None:
                bypass.add(expert)
            else:
                loads.add(expert)
                self.seats[slot] = layer, expert
        return hits, loads, bypass

    def victim(self, layer: int) -> int | None:
        free = [slot for slot in range(self.num_slots) if slot not in self.seats]
        if free:
            return free[0]
        before = self.step - 1
        idle = {s: k for s, k in self.seats.items() if self.last_use(k) < before}
        if idle and self.left_to_replace:
            self.left_to_replace -= 1
            return min(idle, key=lambda s: (self.worth(idle[s], before), s))
        passed = {
            s: k for s, k in self.seats.items() if self.last_use(k) == before and k[0] <= layer
        }
        if not passed:
            return None
        return min(passed, key=lambda s: (passed[s][0], self.worth(passed[s], before), s))


@given(num_slots=st.integers(0, 20), steps=STEPS)
def test_resolve_gives_every_expert_of_a_step_its_own_place(
    num_slots: int, steps: list[tuple[list[int], ...]]
) -> None:
    policy = SlotPolicy(num_slots)
    for step in steps:
        taken: dict[int, int] = {}
        for layer, experts in enumerate(step):
            found = policy.resolve(layer, experts)
            policy.check()
            slots = [*found.hits.values(), *found.loads.values()]
            assert sorted([*found.hits, *found.loads, *found.bypass]) == sorted(experts)
            held = policy.find(layer)
            assert {e: held[e] for e in found.hits | found.loads} == found.hits | found.loads
            taken |= dict.fromkeys(slots, layer)
            # Nothing that the step has used so far has lost its slot.
            assert len(taken) == len(set(taken))
        used = [slot for layer in range(3) for slot in policy.find(layer).values()]
        assert set(taken) <= set(used)
        policy.end_step()
        policy.check()
