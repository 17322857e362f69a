"""The ring of a pass: what it brings, in which order, and what it counts."""

from __future__ import annotations

import pytest
import torch

from freetoken.experts.bank import RowBank
from freetoken.experts.layout import ExpertLayout
from freetoken.experts.stream import PassRing

E, L, N = 4, 3, 5
LAYOUT = ExpertLayout.plan({"up_proj": (2, 8), "down_proj": (8, 2)}, torch.float32)


class Streams:
    """Banks, a pool, and the ring between them; expert e of layer i is full of 10 · i + e."""

    def __init__(self, *, overlaps: bool = True) -> None:
        self.banks = [RowBank(LAYOUT, E) for _ in range(L)]
        for i, bank in enumerate(self.banks):
            for e in range(E):
                bank.put(e, "up_proj", torch.full((2, 8), 10.0 * i + e))
                bank.put(e, "down_proj", torch.full((8, 2), 10.0 * i + e))
        self.pool = torch.zeros(N + E, LAYOUT.row_bytes, dtype=torch.uint8)
        self.slot_of = torch.full((L * E,), -1, dtype=torch.int32)
        self.ring = PassRing(self.banks, self.pool, self.slot_of, overlaps=overlaps)

    def seat(self, layer: int, expert: int, slot: int) -> None:
        self.slot_of[self.slot_of == slot] = -1
        self.slot_of[layer * E + expert] = slot
        self.pool[slot] = self.banks[layer].rows[expert]

    def check(self, layer: int, ids: list[list[int]]) -> None:
        self.ring.enter_layer(layer)
        views = self.ring.take(layer, torch.tensor(ids))
        for e in range(E):
            assert bool((views["up_proj"][e] == 10.0 * layer + e).all())
            assert bool((views["down_proj"][e] == 10.0 * layer + e).all())


@pytest.mark.parametrize("overlaps", [True, False])
def test_each_layer_has_all_its_experts(overlaps: bool) -> None:
    streams = Streams(overlaps=overlaps)
    for layer, expert, slot in ((0, 1, 4), (1, 0, 0), (1, 3, 2), (2, 2, 3)):
        streams.seat(layer, expert, slot)
    ring = streams.ring
    ring.begin_pass()
    streams.check(0, [[0, 1], [1, -1]])
    ring.take(0, torch.tensor([[E, 3]]))
    streams.check(1, [[2, 2]])
    streams.check(2, [[0, 1], [2, 3]])
    ring.end_pass()
    assert (ring.hits, ring.misses) == (4, L * E - 4)
    assert int(ring.distinct) == 3 + 1 + 4


def test_steps_at_a_pause_may_evict_what_the_pass_counted_on() -> None:
    streams = Streams()
    for expert in range(E):
        streams.seat(1, expert, expert)
    streams.seat(2, 0, 4)
    ring = streams.ring
    ring.begin_pass()
    streams.check(0, [[0]])  # layer 1 sets out, from slots
    ring.pause_pass()
    assert not ring.is_running
    for slot in range(N):
        streams.seat(0, slot % E, slot)
    streams.pool[:N] = 0
    for expert in range(E):
        streams.seat(0, expert, expert)
    streams.seat(2, 3, 4)
    ring.resume_pass()
    streams.check(1, [[0, 1]])
    streams.check(2, [[0, 3]])
    ring.end_pass()


def test_pass_that_was_given_up_leaves_the_ring_ready() -> None:
    streams = Streams()
    streams.ring.begin_pass()
    streams.check(0, [[0]])
    streams.ring.pause_pass()
    streams.ring.end_pass()
    streams.ring.begin_pass()
    for layer in range(L):
        streams.check(layer, [[1]])
    streams.ring.end_pass()
    streams.ring.end_pass()
    assert streams.ring.misses == 2 * E + L * E
