"""Slots in plain torch: the specification of triton_slots.py, and the CPU's way.

Equal to experts/policy.py number for number; see slot_tables.py for what the tables hold.
"""

from __future__ import annotations

import torch

from freetoken.kernels.slot_order import (
    DECAY_NUMERATOR,
    DECAY_SHIFT,
    FREE_KEY,
    KEPT_KEY,
    KEPT_LAYER_SHIFT,
    KEPT_SHIFT,
    MAX_AGE,
    ONE_USE,
    num_victims,
)
from freetoken.kernels.slot_tables import BYPASSED, DISTINCT, HITS, MISSES, SlotTables


def resolve(
    tables: SlotTables, ids: torch.Tensor, num_tokens: torch.Tensor | None, layer: int
) -> None:
    """See slot_ops.resolve."""
    first = layer * tables.num_experts
    counts = _group_pairs(tables, ids, num_tokens)
    needed = counts > 0
    numbers = slice(first, first + tables.num_experts)
    slots = tables.slot_of[numbers]
    hits = slots[needed & (slots >= 0)].long()
    tables.stamp[hits] = tables.clock
    tables.priority[numbers] += needed.int() * ONE_USE
    tables.rows.copy_(torch.where(needed, slots, -1))
    missing = (needed & (slots < 0)).nonzero().flatten()
    num_missing = len(missing)
    victims = _take_victims(tables, num_missing, first + tables.num_experts)
    num_seated = len(victims)
    _seat(tables, first + missing[:num_seated], victims)
    scratch = torch.arange(num_missing - num_seated) + tables.num_slots
    fetch_rows = torch.cat([victims, scratch]).int()
    tables.rows[missing] = fetch_rows
    tables.fetch_experts[:num_missing] = missing.int()
    tables.fetch_rows[:num_missing] = fetch_rows
    tables.num_fetch.fill_(num_missing)
    tables.counters[HITS] += len(hits)
    tables.counters[MISSES] += num_missing
    tables.counters[DISTINCT] += len(hits) + num_missing
    tables.counters[BYPASSED] += num_missing - num_seated


def build_queue(tables: SlotTables) -> None:
    """See slot_ops.build_queue."""
    owner = tables.owner.long()
    age = tables.clock - tables.stamp
    priority = tables.priority[owner.clamp(min=0)]
    layer = owner // tables.num_experts
    kept = KEPT_KEY + (layer << KEPT_LAYER_SHIFT) + (priority >> KEPT_SHIFT)
    key = torch.where(priority > 0, MAX_AGE + priority, MAX_AGE - age.clamp(max=MAX_AGE))
    key = torch.where(age == 0, kept, key)
    key = torch.where(owner < 0, FREE_KEY, key)
    tables.queue.copy_(key.argsort(stable=True))
    num_free = int((key == FREE_KEY).sum())
    num_kept = int((key >= KEPT_KEY).sum())
    tables.num_victims.fill_(num_victims(tables.num_slots, num_free, num_kept))
    tables.cursor.zero_()
    rounding = (1 << DECAY_SHIFT) - 1
    tables.priority.sub_((tables.priority * DECAY_NUMERATOR + rounding) >> DECAY_SHIFT)
    tables.clock.add_(1)


def fetch(bank_rows: torch.Tensor, pool_rows: torch.Tensor, tables: SlotTables) -> None:
    """See slot_ops.fetch."""
    num_fetch = int(tables.num_fetch)
    experts = tables.fetch_experts[:num_fetch].tolist()
    rows = tables.fetch_rows[:num_fetch].tolist()
    for expert, row in zip(experts, rows, strict=True):
        pool_rows[row].copy_(bank_rows[expert])


def _group_pairs(
    tables: SlotTables, ids: torch.Tensor, num_tokens: torch.Tensor | None
) -> torch.Tensor:
    """Fill active, offsets and pairs; how many pairs ask for each expert, [E] int64."""
    flat = ids.flatten().long()
    routed = (flat >= 0) & (flat < tables.num_experts)
    if num_tokens is not None:
        routed &= torch.arange(len(flat)) < num_tokens * ids.shape[1]
    flat = torch.where(routed, flat, tables.num_experts)
    counts = torch.bincount(flat, minlength=tables.num_experts + 1)[: tables.num_experts]
    active = counts.nonzero().flatten()
    ends = counts[active].cumsum(0)
    num_active, num_pairs = len(active), int(counts.sum())
    tables.active[:num_active] = active.int()
    tables.num_active.fill_(num_active)
    tables.offsets[0] = 0
    tables.offsets[1 : num_active + 1] = ends.int()
    tables.offsets[num_active + 1 :] = num_pairs
    tables.pairs[:num_pairs] = flat.argsort(stable=True)[:num_pairs].int()
    return counts


def _take_victims(tables: SlotTables, count: int, end_number: int) -> torch.Tensor:
    """Up to `count` slots from the head of the queue, [n] int64.

    end_number: the first (layer, expert) of the next layer.
    """
    if count == 0:
        return torch.empty(0, dtype=torch.int64)
    start, end = int(tables.cursor), int(tables.num_victims)
    queue = tables.queue[start:end].long()
    stamp = tables.stamp[queue]
    waiting = (stamp == tables.clock - 1) & (tables.owner[queue] >= end_number)
    num_open = int((waiting.cumsum(0) == 0).sum())
    unused = (stamp[:num_open] != tables.clock).nonzero().flatten()[:count]
    num_passed = int(unused[-1]) + 1 if len(unused) == count else num_open
    tables.cursor.fill_(start + num_passed)
    return queue[unused]


def _seat(tables: SlotTables, numbers: torch.Tensor, slots: torch.Tensor) -> None:
    """Let the experts `numbers` [n] take `slots` [n] from whoever is there."""
    old = tables.owner[slots].long()
    tables.slot_of[old[old >= 0]] = -1
    tables.slot_of[numbers] = slots.int()
    tables.owner[slots] = numbers.int()
    tables.stamp[slots] = tables.clock
