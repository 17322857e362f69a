"""Which expert sits in which slot: one pool of slots for all layers. Torch-free.

The twin of the device's tables (kernels/slot_tables.py), and equal to them number for number: it is
what they are tested against, and what tools/replay_policy.py replays traces with.

Victims are put in order once a step, when it ends: free slots, then those that the step has not
used, lowest priority first (kernels/slot_order.py), then those that it has used, by layer. During
the next step layer after layer takes victims from the head of that queue, passing over slots that
the step has used meanwhile. It takes a share of all slots at most, so that a wide step cannot
sweep out what the rows that decode come back to. Only where fewer than that are idle it goes on to
slots that the last step has used, and takes one when its own layer has passed without using it
again. When there is none, experts bypass the slots. So a step that asks for more experts than
there are slots keeps what it will use, where any order of eviction by age misses every time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from freetoken.kernels.slot_order import (
    FREE_KEY,
    KEPT_KEY,
    ONE_USE,
    decayed,
    num_victims,
    order_key,
)

# (layer, expert)
Key = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Resolution:
    """Where a layer's experts are found in this step, by expert number.

    hits: expert → slot that holds it · loads: expert → slot to fill · bypass: experts for which
    there is no slot, ascending.
    """

    hits: dict[int, int]
    loads: dict[int, int]
    bypass: tuple[int, ...]


class SlotPolicy:
    """Decaying use, ordered once a step. `clock` is the number of the running step, from 1."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.clock = 1
        self._slot_of: dict[Key, int] = {}
        self._owner: list[Key | None] = [None] * num_slots
        self._stamp = [0] * num_slots
        self._priority: dict[Key, int] = {}
        self._queue = list(range(num_slots))
        self._cursor = 0

    def fill(self, per_layer: Sequence[int]) -> None:
        """Before the first step: experts [0, n) of each layer sit in slots, n from `per_layer`."""
        assert self.clock == 1
        assert not self._slot_of
        slot = 0
        for layer, count in enumerate(per_layer):
            for expert in range(count):
                self._slot_of[layer, expert] = slot
                self._owner[slot] = layer, expert
                slot += 1
        self.end_step()

    def resolve(self, layer: int, experts: Iterable[int]) -> Resolution:
        """Find or make room for a layer's experts, once per step; the caller fills `loads`."""
        hits: dict[int, int] = {}
        missing = []
        for expert in sorted(set(experts)):
            slot = self._slot_of.get((layer, expert))
            if slot is None:
                missing.append(expert)
            else:
                hits[expert] = slot
                self._stamp[slot] = self.clock
            self._priority[layer, expert] = self._priority.get((layer, expert), 0) + ONE_USE
        loads: dict[int, int] = {}
        bypass = []
        for expert in missing:
            slot = self._take_victim(layer)
            if slot is None:
                bypass.append(expert)
            else:
                self._seat((layer, expert), slot)
                loads[expert] = slot
        return Resolution(hits, loads, tuple(bypass))

    def end_step(self) -> None:
        """Let priorities decay and put the next step's victims in order."""
        keys = [self._order_key(slot) for slot in range(self.num_slots)]
        order = sorted(range(self.num_slots), key=keys.__getitem__)
        num_free = keys.count(FREE_KEY)
        num_kept = sum(key >= KEPT_KEY for key in keys)
        self._queue = order[: num_victims(self.num_slots, num_free, num_kept)]
        self._cursor = 0
        self._priority = {
            key: value for key, old in self._priority.items() if (value := decayed(old)) > 0
        }
        self.clock += 1

    def find(self, layer: int) -> dict[int, int]:
        """Expert → slot of a layer's experts that are held; changes nothing."""
        return {e: slot for (held_layer, e), slot in self._slot_of.items() if held_layer == layer}

    def check(self) -> None:
        """Assert that owners and slots name each other and nothing is used in the future."""
        owned = {key: slot for slot, key in enumerate(self._owner) if key is not None}
        assert owned == self._slot_of, "a slot is lost or held twice"
        assert all(0 <= stamp <= self.clock for stamp in self._stamp), (
            "a slot is used in the future"
        )
        assert len(set(self._queue)) == len(self._queue), "a slot is queued twice"

    def _order_key(self, slot: int) -> int:
        owner = self._owner[slot]
        if owner is None:
            return FREE_KEY
        age = self.clock - self._stamp[slot]
        return order_key(owner[0], self._priority.get(owner, 0), age)

    def _take_victim(self, layer: int) -> int | None:
        while self._cursor < len(self._queue):
            slot = self._queue[self._cursor]
            owner = self._owner[slot]
            if owner and owner[0] > layer and self._stamp[slot] == self.clock - 1:
                return None
            self._cursor += 1
            if self._stamp[slot] != self.clock:
                return slot
        return None

    def _seat(self, key: Key, slot: int) -> None:
        old = self._owner[slot]
        if old is not None:
            del self._slot_of[old]
        self._owner[slot] = key
        self._slot_of[key] = slot
        self._stamp[slot] = self.clock
