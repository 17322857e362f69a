"""Which expert sits in which slot: plain recency over one pool for all layers. Torch-free.

It only decides; SlotPool moves the bytes. A step's own experts are never its victims: when a layer
asks for more experts than there are slots, the rest bypass the slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resolution:
    """Where a layer's experts are found in this step, by expert number.

    hits: expert → slot that holds it · loads: expert → slot to fill · bypass: experts for which
    there is no slot.
    """

    hits: dict[int, int]
    loads: dict[int, int]
    bypass: tuple[int, ...]


class RecencyPolicy:
    """Evicts the expert whose last use is longest ago."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        # (layer, expert) → slot, the longest unused first.
        self._held: OrderedDict[tuple[int, int], int] = OrderedDict()

    def resolve(self, layer: int, experts: Sequence[int]) -> Resolution:
        """Find or make room for `experts`, all different; the caller fills `loads` at once."""
        hits: dict[int, int] = {}
        for expert in experts:
            slot = self._held.get((layer, expert))
            if slot is not None:
                hits[expert] = slot
                self._held.move_to_end((layer, expert))
        wanted = {(layer, expert) for expert in experts}
        loads: dict[int, int] = {}
        bypass = []
        for expert in experts:
            if expert in hits:
                continue
            slot = self._take_slot(wanted)
            if slot is None:
                bypass.append(expert)
            else:
                loads[expert] = slot
                self._held[layer, expert] = slot
        return Resolution(hits, loads, tuple(bypass))

    def find(self, layer: int) -> dict[int, int]:
        """Expert → slot of a layer's experts that are held; changes nothing."""
        return {e: slot for (held_layer, e), slot in self._held.items() if held_layer == layer}

    def check(self) -> None:
        """Assert that each slot is free or held, exactly once."""
        taken = [*self._free, *self._held.values()]
        assert sorted(taken) == list(range(self.num_slots)), "a slot is lost or held twice"

    def _take_slot(self, wanted: set[tuple[int, int]]) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._held:
            return None
        # Everything wanted was just moved to the end: if the oldest is wanted, all are.
        oldest = next(iter(self._held))
        return None if oldest in wanted else self._held.pop(oldest)
