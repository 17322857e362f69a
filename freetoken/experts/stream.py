"""Streams whole layers of experts through a ring of two layers: for passes.

A layer's experts that have no slot come from the bank, each once, by the copy engine on a stream of
their own; those in slots are copied on the device. While a layer computes the next one is on its
way, so that a pass takes the longer of both, not the sum. Half of the ring is free again when the
layer before has computed: then, and not earlier, its copies begin. Banks that are not pinned are
sent by the host, which queues a layer's arithmetic first and sends the next one beside it.

Which experts sit in slots is read when a pass begins and each time it is resumed, as on-demand
steps in between change it. What was on its way at a pause stays valid: its copies from slots were
queued before anything that those steps do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from freetoken.experts.bank import RowBank, allocate_rows, row_views
from freetoken.experts.staging import RowCopier, copy_rows

HALVES = 2


class PassRing:
    """Rows [2, E, row_bytes]; layer i is in half i % 2, expert e in row e of it.

    pool_rows: [N + E, row_bytes] · slot_of: [L · E] int32, −1 absent, as SlotTables has them ·
    `overlaps`: whether a layer's copies may begin before the layer before has computed.
    """

    def __init__(
        self,
        banks: Sequence[RowBank],
        pool_rows: torch.Tensor,
        slot_of: torch.Tensor,
        *,
        overlaps: bool = True,
    ) -> None:
        layout, num_experts = banks[0].layout, banks[0].num_experts
        device = pool_rows.device
        self._banks = banks
        self._num_experts = num_experts
        self._pool_rows = pool_rows
        self._slot_of = slot_of
        self._overlaps = overlaps
        rows = allocate_rows(HALVES * num_experts, layout.row_bytes, device)
        self._halves = rows.view(HALVES, num_experts, layout.row_bytes)
        self._views = [row_views(layout, half) for half in self._halves]
        self._copier = RowCopier(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # By layer, modulo 2: its experts are there; all before it has computed.
        self._arrived = [torch.cuda.Event() for _ in self._halves] if self._stream else []
        self._entered = [torch.cuda.Event() for _ in self._halves] if self._stream else []
        self._slots: list[list[int]] = []
        self._num_issued = 0
        self._layer: int | None = None
        self._has_waited = False
        self.is_running = False
        # Whoever counts takes these three and starts them again.
        self.has_entered = False
        self.hits = 0
        self.misses = 0
        # Experts that the layer's tokens have asked for, and one place for ids to be skipped.
        self._asked = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
        self.distinct = torch.zeros(1, dtype=torch.int64, device=device)

    def follow(self, pool_rows: torch.Tensor, slot_of: torch.Tensor) -> None:
        """The slots have moved; no pass is open."""
        assert not self.is_running
        self._pool_rows, self._slot_of = pool_rows, slot_of

    def begin_pass(self) -> None:
        """Layers come one after the other now; the first one's experts set out."""
        if self._stream is not None:
            # Of a pass that was given up, copies may still be on their way.
            torch.cuda.current_stream().wait_stream(self._stream)
            self._entered[-1].record()
        self._num_issued = 0
        self._layer = None
        self.resume_pass()
        self._issue(0)

    def enter_layer(self, layer: int) -> None:
        """The chunks of `layer` come next; what is queued so far has computed those before."""
        self._count_asked()
        self._await_experts()  # of the layer before, if nobody took them: their rows come again
        self._layer = layer
        self.has_entered = True
        if self._stream is not None:
            self._entered[layer % HALVES].record()
        self._issue(layer)
        if self._sets_out_early(layer + 1):
            self._issue(layer + 1)
        self._has_waited = False

    def take(self, layer: int, ids: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The layer's experts as views [E, *shape], for tokens that ask for ids [T, K]."""
        assert layer == self._layer, f"layer {layer} computes, layer {self._layer} was entered"
        self._await_experts()  # here and not before: the layer's attention needs no experts
        ids = ids.flatten().long()
        skipped = (ids < 0) | (ids >= self._num_experts)
        self._asked.index_fill_(0, ids.masked_fill(skipped, self._num_experts), 1)
        return self._views[layer % HALVES]

    def pause_pass(self) -> None:
        """On-demand steps may follow."""
        self.is_running = False

    def resume_pass(self) -> None:
        """Look again at what sits in slots; waits for the device."""
        self._slots = self._slot_of.view(len(self._banks), self._num_experts).tolist()
        self.is_running = True

    def end_pass(self) -> None:
        """Harmless when nothing was begun."""
        self._count_asked()
        self._layer = None
        self.is_running = False

    def _await_experts(self) -> None:
        """What is queued from now on finds the experts of the layer that was entered."""
        if self._stream is None or self._layer is None or self._has_waited:
            return
        torch.cuda.current_stream().wait_event(self._arrived[self._layer % HALVES])
        self._has_waited = True

    def _sets_out_early(self, layer: int) -> bool:
        """Whether a layer's copies are queued before the arithmetic of the layer before."""
        if not self._overlaps or layer >= len(self._banks):
            return False
        return self._stream is None or self._banks[layer].is_pinned

    def _issue(self, layer: int) -> None:
        """Queue the copies of a layer, unless they are queued."""
        if layer < self._num_issued:
            return
        self._num_issued = layer + 1
        half = self._halves[layer % HALVES]
        slots = self._slots[layer]
        held = [(slot, expert) for expert, slot in enumerate(slots) if slot >= 0]
        copy_rows(self._pool_rows, half, held)
        missing = [(expert, expert) for expert, slot in enumerate(slots) if slot < 0]
        self.hits += len(held)
        self.misses += len(missing)
        if self._stream is None:
            self._copier.copy(self._banks[layer], half, missing)
            return
        if self._overlaps:
            self._stream.wait_event(self._entered[(layer - 1) % HALVES])
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copier.copy(self._banks[layer], half, missing)
            self._arrived[layer % HALVES].record()

    def _count_asked(self) -> None:
        if self._layer is not None:
            self.distinct += self._asked[: self._num_experts].sum()
            self._asked.zero_()
