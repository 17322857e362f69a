"""Expert slots: rows on the device that experts of all layers share, and the scratch rows.

SlotExperts computes one layer's experts from the shared SlotPool. On demand, a step's missing
experts are loaded into slots. In a pass, a layer's missing experts are loaded once, into scratch
rows, and serve all chunks of that layer; the slots are read and left as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from freetoken.experts.bank import RowBank, allocate_rows, row_views
from freetoken.experts.layout import ExpertLayout
from freetoken.experts.policy import SlotPolicy
from freetoken.experts.stream import copy_rows
from freetoken.kernels.ops import Gate, GroupedExperts, PostNorm


@dataclass(slots=True)
class SlotCounters:
    """hits and misses: experts found in a slot or loaded · bytes: loaded ·
    distinct: experts that tokens asked for, once per layer and step."""

    hits: int = 0
    misses: int = 0
    bytes: int = 0
    distinct: int = 0


class SlotPool:
    """Rows `[0, num_slots)` are slots, the `num_experts` rows after them scratch."""

    def __init__(
        self, layout: ExpertLayout, num_slots: int, num_experts: int, device: torch.device | str
    ) -> None:
        self.layout = layout
        self.num_slots = num_slots
        self.num_experts = num_experts
        self.rows = allocate_rows(num_slots + num_experts, layout.row_bytes, device)
        self.views = row_views(layout, self.rows)
        self.policy = SlotPolicy(num_slots)
        self._last_layer = -1
        self.counters = SlotCounters()
        self.in_pass = False
        self._pass_layer: int | None = None
        self._pass_rows: torch.Tensor | None = None
        self._pass_used: set[int] = set()

    def begin_pass(self) -> None:
        """Until `end_pass`, layers come one after the other, each in any number of chunks."""
        self.in_pass = True
        self._pass_layer = None

    def end_pass(self) -> None:
        self._leave_layer()
        self.in_pass = False

    def rows_on_demand(self, layer: int, bank: RowBank, experts: list[int]) -> torch.Tensor:
        """Load what is missing of `experts`; the row of each expert, [E + 1] int64, −1: none."""
        if layer <= self._last_layer:
            self.policy.end_step()
        self._last_layer = layer
        found = self.policy.resolve(layer, experts)
        scratch = {expert: self.num_slots + i for i, expert in enumerate(found.bypass)}
        loads = found.loads | scratch
        self._load(bank, loads)
        self.counters.hits += len(found.hits)
        self.counters.distinct += len(experts)
        return self._row_table(found.hits | loads)

    def rows_in_pass(self, layer: int, bank: RowBank, experts: list[int]) -> torch.Tensor:
        """Like rows_on_demand; the first call for a layer loads all of its missing experts."""
        if layer != self._pass_layer:
            self._leave_layer()
            held = self.policy.find(layer)
            missing = [expert for expert in range(self.num_experts) if expert not in held]
            scratch = {expert: self.num_slots + i for i, expert in enumerate(missing)}
            self._load(bank, scratch)
            self.counters.hits += len(held)
            self._pass_layer = layer
            self._pass_rows = self._row_table(held | scratch)
        assert self._pass_rows is not None
        self._pass_used.update(experts)
        return self._pass_rows

    def _leave_layer(self) -> None:
        self.counters.distinct += len(self._pass_used)
        self._pass_used.clear()
        self._pass_layer = None
        self._pass_rows = None

    def _load(self, bank: RowBank, loads: dict[int, int]) -> None:
        self.counters.bytes += copy_rows(bank.rows, self.rows, loads.items())
        self.counters.misses += len(loads)

    def _row_table(self, rows: dict[int, int]) -> torch.Tensor:
        table = torch.full((self.num_experts + 1,), -1, dtype=torch.int64)
        for expert, row in rows.items():
            table[expert] = row
        return table.to(self.rows.device)


class SlotExperts:
    """The routed experts of one layer, computed from slots."""

    def __init__(
        self,
        layer: int,
        bank: RowBank,
        pool: SlotPool,
        kernel: GroupedExperts,
        gate: Gate,
        post_norm: PostNorm = None,
    ) -> None:
        assert bank.layout == pool.layout, "all layers must have the pool's layout"
        self._layer = layer
        self._bank = bank
        self._pool = pool
        self._kernel = kernel
        self._gate = gate
        self._post_norm = post_norm

    def __call__(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden: [T, C], ids and weights: [T, K] → [T, C]; ids outside [0, E) are skipped."""
        num_experts = self._pool.num_experts
        ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
        experts = [expert for expert in torch.unique(ids).tolist() if expert < num_experts]
        find = self._pool.rows_in_pass if self._pool.in_pass else self._pool.rows_on_demand
        rows = find(self._layer, self._bank, experts)[ids]
        views = self._pool.views
        return self._kernel(hidden, rows, weights, views, self._gate, self._post_norm)
