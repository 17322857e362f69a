"""The device's tables of expert slots: who sits where, who goes next, what a layer needs.

SlotTables is plain tensors, changed in place by kernels/slot_ops.py only, so that everything may be
part of a CUDA graph. The rules are those of experts/policy.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Places in `counters`.
HITS, MISSES, DISTINCT, BYPASSED = range(4)


@dataclass(frozen=True, slots=True)
class SlotTables:
    """L layers, E experts a layer, N slots; int32 unless said, all on one device.

    A (layer, expert) has the number layer·E + expert. Pool rows [0, N) are slots, [N, N + E) are
    scratch.

    Kept from step to step:
    slot_of [L·E]: slot, −1 absent · owner [N]: number, −1 free · stamp [N] int64: last step that
    used the slot, 0 never · priority [L·E]: see slot_order · clock [1] int64: the running step,
    from 1 · queue [N], num_victims [1], cursor [1]: slots that this step may take, in order, and
    how many it has passed · counters [4] int64: experts, once per layer and step: found in a slot,
    fetched, asked for, fetched into scratch rows.

    Of the layer that was resolved last; entries behind the counts are leftovers:
    rows [E]: pool row, −1 not needed · fetch_experts, fetch_rows [E], num_fetch [1]: bank row to
    pool row · cpu_experts [E], num_cpu [1]: computed by the CPU, none so far · active [E],
    num_active [1]: experts that are needed, ascending · offsets [E + 1], pairs [max_pairs]: the
    pairs (token · K + k) of active expert i are pairs[offsets[i] : offsets[i + 1]], ascending;
    offsets behind num_active repeat the number of pairs.

    keys [N]: working memory of build_queue.
    """

    num_layers: int
    num_experts: int
    num_slots: int
    max_pairs: int
    slot_of: torch.Tensor
    owner: torch.Tensor
    stamp: torch.Tensor
    priority: torch.Tensor
    clock: torch.Tensor
    queue: torch.Tensor
    num_victims: torch.Tensor
    cursor: torch.Tensor
    counters: torch.Tensor
    rows: torch.Tensor
    fetch_experts: torch.Tensor
    fetch_rows: torch.Tensor
    num_fetch: torch.Tensor
    cpu_experts: torch.Tensor
    num_cpu: torch.Tensor
    active: torch.Tensor
    num_active: torch.Tensor
    offsets: torch.Tensor
    pairs: torch.Tensor
    keys: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.slot_of.device

    @property
    def num_bytes(self) -> int:
        """Memory of all tables."""
        tensors = (getattr(self, name) for name in self.__dataclass_fields__)
        return sum(t.numel() * t.itemsize for t in tensors if isinstance(t, torch.Tensor))


def allocate(
    num_layers: int,
    num_experts: int,
    num_slots: int,
    max_pairs: int,
    device: torch.device | str,
) -> SlotTables:
    """Tables of an empty pool. max_pairs: most tokens of an on-demand step, times K."""

    def zeros(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    def absent(size: int) -> torch.Tensor:
        return torch.full((size,), -1, dtype=torch.int32, device=device)

    tables = SlotTables(
        num_layers=num_layers,
        num_experts=num_experts,
        num_slots=num_slots,
        max_pairs=max_pairs,
        slot_of=absent(num_layers * num_experts),
        owner=absent(num_slots),
        stamp=zeros(num_slots, torch.int64),
        priority=zeros(num_layers * num_experts),
        clock=zeros(1, torch.int64),
        queue=zeros(num_slots),
        num_victims=zeros(1),
        cursor=zeros(1),
        counters=zeros(4, torch.int64),
        rows=absent(num_experts),
        fetch_experts=zeros(num_experts),
        fetch_rows=zeros(num_experts),
        num_fetch=zeros(1),
        cpu_experts=zeros(num_experts),
        num_cpu=zeros(1),
        active=zeros(num_experts),
        num_active=zeros(1),
        offsets=zeros(num_experts + 1),
        pairs=zeros(max_pairs),
        keys=zeros(num_slots),
    )
    clear(tables)
    return tables


def clear(tables: SlotTables) -> None:
    """Forget what sits where, as if nothing had run; counters too. Changes tables in place."""
    for name in ("slot_of", "owner", "rows"):
        getattr(tables, name).fill_(-1)
    for name in ("stamp", "priority", "cursor", "counters", "num_fetch", "num_active", "offsets"):
        getattr(tables, name).zero_()
    tables.clock.fill_(1)
    tables.num_victims.fill_(tables.num_slots)
    torch.arange(tables.num_slots, dtype=torch.int32, out=tables.queue)


def seat(tables: SlotTables, per_layer: Sequence[int]) -> None:
    """As `clear`, but experts [0, n) of each layer sit in slots side by side, n from `per_layer`.

    As if they had never been used. A `build_queue` must follow.
    """
    assert len(per_layer) == tables.num_layers
    assert sum(per_layer) <= tables.num_slots
    clear(tables)
    first = 0
    for layer, count in enumerate(per_layer):
        number = layer * tables.num_experts
        device = tables.device
        numbers = torch.arange(number, number + count, dtype=torch.int32, device=device)
        slots = torch.arange(first, first + count, dtype=torch.int32, device=device)
        tables.owner[first : first + count] = numbers
        tables.slot_of[number : number + count] = slots
        first += count
