"""Expert slots: rows on the device that experts of all layers share, and the scratch rows.

SlotExperts computes one layer's experts. On demand, `resolve` says which row each expert that is
asked for has or gets, `fetch` fills the rows of those that were absent, and the kernels compute
from the rows: all on the device, so that it may be part of a CUDA graph. In a pass the layer's
experts lie side by side in the ring of experts/stream.py, and the slots are left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from freetoken.experts.bank import RowBank, allocate_rows, row_views
from freetoken.experts.layout import ExpertLayout
from freetoken.experts.staging import RowCopier
from freetoken.experts.stream import PassRing
from freetoken.kernels import slot_tables
from freetoken.kernels.expert_inputs import Groups, Routing
from freetoken.kernels.expert_ops import experts_in_pass, experts_on_demand
from freetoken.kernels.gates import GateKind
from freetoken.kernels.ops import Gate, PostNorm
from freetoken.kernels.slot_ops import build_queue, fetch, resolve

MIN_PAIRS = 1 << 16
"""Token-expert pairs of an on-demand step for which there is room from the start, 4 bytes each."""


class SlotPool:
    """Rows `[0, num_slots)` are slots, the `num_experts` rows after them scratch.

    `banks`: of all layers with experts, in order.
    """

    def __init__(
        self, banks: Sequence[RowBank], num_slots: int, device: torch.device | str
    ) -> None:
        first = banks[0]
        assert all(bank.layout == first.layout for bank in banks), "layers must have one layout"
        self.banks = banks
        self.layout: ExpertLayout = first.layout
        self.num_experts = first.num_experts
        self.rows: torch.Tensor
        self.views: Mapping[str, torch.Tensor]
        self._allocate(num_slots, device)
        self._copier = RowCopier(self.rows.device)
        self._num_tokens: torch.Tensor | None = None
        self._is_queued = False
        self._side = torch.cuda.Stream(device) if self.rows.is_cuda else None
        # Tensors that captured graphs may still write to.
        self._retired: list[torch.Tensor] = []

    def resize(self, num_slots: int) -> None:
        """Other rows and tables, empty; the old memory is given back first.

        torch.OutOfMemoryError: there are no slots now, and fewer may be asked for.
        """
        device = self.rows.device
        self.num_slots = 0
        self.rows = self.rows.new_empty(0)
        self.views = {}
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self._allocate(num_slots, device)

    def _allocate(self, num_slots: int, device: torch.device | str) -> None:
        self.rows = allocate_rows(num_slots + self.num_experts, self.layout.row_bytes, device)
        self.num_slots = num_slots
        self.views = row_views(self.layout, self.rows)
        self.tables = slot_tables.allocate(
            len(self.banks), self.num_experts, num_slots, MIN_PAIRS, device
        )

    def fill(self) -> None:
        """Seat as many experts of each layer as slots allow, so that no slot starts empty.

        Which ones is arbitrary: it is the share of a layer that a pass need not fetch. Between
        steps; what sat in the slots is forgotten, and the counters start again.
        """
        num_layers = len(self.banks)
        per_layer = [
            min(self.num_experts, (self.num_slots + layer) // num_layers)
            for layer in range(num_layers)
        ]
        slot_tables.seat(self.tables, per_layer)
        first = 0
        for bank, count in zip(self.banks, per_layer, strict=True):
            self._copier.copy(bank, self.rows, [(e, first + e) for e in range(count)])
            first += count
        build_queue(self.tables)

    @property
    def is_pinned(self) -> bool:
        """Whether the device reads all banks by itself."""
        return not self.rows.is_cuda or all(bank.is_pinned for bank in self.banks)

    def begin_step(self, num_tokens: torch.Tensor | None) -> None:
        """An on-demand step follows. num_tokens: [1] int32, tokens beyond it are padding."""
        self._num_tokens = num_tokens
        self._is_queued = False

    def end_step(self) -> None:
        """After the last layer, or a fault: the next step's victims are put in order."""
        if not self._is_queued:
            build_queue(self.tables)
        elif self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        self._num_tokens = None

    def load(self, layer: int, ids: torch.Tensor, weights: torch.Tensor) -> tuple[Routing, Groups]:
        """See to it that the experts which a layer's tokens ask for are in rows of the pool."""
        if ids.numel() > self.tables.max_pairs:
            self._grow(ids.numel())
        tables = self.tables
        resolve(tables, ids, self._num_tokens, layer)
        bank = self.banks[layer]
        if not self.rows.is_cuda or bank.is_pinned:
            fetch(bank.rows, self.rows, tables)
        else:
            self._fetch_staged(bank)
        if layer == len(self.banks) - 1:
            self._queue()
        groups = Groups(tables.rows, tables.active, tables.num_active, tables.offsets, tables.pairs)
        return Routing(ids, weights, self._num_tokens), groups

    def _fetch_staged(self, bank: RowBank) -> None:
        """For banks that the device cannot read: the host asks what is missing, and sends it."""
        count = int(self.tables.num_fetch)
        experts = self.tables.fetch_experts[:count].tolist()
        rows = self.tables.fetch_rows[:count].tolist()
        self._copier.copy(bank, self.rows, list(zip(experts, rows, strict=True)))

    def _queue(self) -> None:
        """Put victims in order while the last layer computes, which needs none of it."""
        self._is_queued = True
        if self._side is None:
            build_queue(self.tables)
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            build_queue(self.tables)

    def _grow(self, num_pairs: int) -> None:
        self._retired.append(self.tables.pairs)
        pairs = self.tables.pairs.new_zeros(num_pairs)
        self.tables = replace(self.tables, pairs=pairs, max_pairs=num_pairs)


class SlotExperts:
    """The routed experts of one layer. `gate`: a kind that kernels know, or a Python function."""

    def __init__(
        self,
        layer: int,
        pool: SlotPool,
        ring: PassRing,
        gate: GateKind | Gate,
        post_norm: PostNorm = None,
    ) -> None:
        self._layer = layer
        self._pool = pool
        self._ring = ring
        self._gate = gate
        self._post_norm = post_norm

    def __call__(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden: [T, C], ids and weights: [T, K] → [T, C]; ids outside [0, E) are skipped."""
        if self._ring.is_running:
            views = self._ring.take(self._layer, ids)
            routing = Routing(ids, weights)
            return experts_in_pass(hidden, routing, views, self._gate, self._post_norm)
        routing, groups = self._pool.load(self._layer, ids, weights)
        views = self._pool.views
        return experts_on_demand(hidden, routing, groups, views, self._gate, self._post_norm)
