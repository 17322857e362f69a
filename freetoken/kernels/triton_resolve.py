"""Finds the experts of a layer's tokens in slots, or slots for them, on a GPU.

See reference_slots.resolve for what it computes. A launch has one program that looks experts up and
finds victims, and others that group token-expert pairs beside it; when everything hits, the first
waits for memory three times. Threads of a program hand values to each other through the tables,
with a barrier in between.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freetoken.kernels.slot_order import ONE_USE
from freetoken.kernels.slot_tables import SlotTables

# Up to so many pairs a program has 4 warps, beyond 8.
FEW_PAIRS = 256
# Ids that are counted at a time: at least one for each thread, as tl.histogram wants it.
THREADS, MANY_IDS = 128, 1024
# Pairs that a program finds places for, and others that it compares them with at a time.
SMALL_PAIR_BLOCK, PAIR_BLOCK, MANY_OTHERS = 16, 64, 256


def resolve(
    tables: SlotTables, ids: torch.Tensor, num_tokens: torch.Tensor | None, layer: int
) -> None:
    """See slot_ops.resolve. One launch."""
    num_pairs, top_k = ids.numel(), ids.shape[1]
    few = num_pairs <= FEW_PAIRS
    pair_block = SMALL_PAIR_BLOCK if num_pairs <= SMALL_PAIR_BLOCK else PAIR_BLOCK
    grid = (1 + max(1, triton.cdiv(num_pairs, pair_block)),)
    _resolve[grid](
        ids.contiguous(),
        tables.num_fetch if num_tokens is None else num_tokens,
        tables.slot_of,
        tables.owner,
        tables.stamp,
        tables.priority,
        tables.clock,
        tables.queue,
        tables.num_victims,
        tables.cursor,
        tables.counters,
        tables.rows,
        tables.fetch_experts,
        tables.fetch_rows,
        tables.num_fetch,
        tables.active,
        tables.num_active,
        tables.offsets,
        tables.pairs,
        layer * tables.num_experts,
        tables.num_experts,
        tables.num_slots,
        num_pairs,
        top_k,
        HAS_NUM_TOKENS=num_tokens is not None,
        ONE_USE=ONE_USE,
        EXPERTS=max(THREADS, triton.next_power_of_2(tables.num_experts)),
        IDS=THREADS if few else MANY_IDS,
        PAIRS=pair_block,
        OTHERS=pair_block if few else MANY_OTHERS,
        num_warps=4 if few else 8,
    )


@triton.jit
def _routed_ids(ids, num_tokens, index, num_pairs, top_k, num_experts, HAS_NUM_TOKENS):
    """The experts of pairs `index` as int32; those that do not route become num_experts."""
    expert = tl.load(ids + index, mask=index < num_pairs, other=-1)
    routed = (expert >= 0) & (expert < num_experts)
    if HAS_NUM_TOKENS:
        routed = routed & (index < tl.load(num_tokens) * top_k)
    return tl.where(routed, expert, num_experts).to(tl.int32)


@triton.jit(do_not_specialize=["first", "num_pairs"])
def _resolve(
    ids,
    num_tokens,
    slot_of,
    owner,
    stamp,
    priority,
    clock,
    queue,
    num_victims,
    cursor,
    counters,
    rows,
    fetch_experts,
    fetch_rows,
    num_fetch,
    active,
    num_active,
    offsets,
    pairs,
    first,
    num_experts,
    num_slots,
    num_pairs,
    top_k,
    HAS_NUM_TOKENS: tl.constexpr,
    ONE_USE: tl.constexpr,
    EXPERTS: tl.constexpr,
    IDS: tl.constexpr,
    PAIRS: tl.constexpr,
    OTHERS: tl.constexpr,
):
    program = tl.program_id(0)
    if program == 0:
        _look_up(
            ids,
            num_tokens,
            slot_of,
            owner,
            stamp,
            priority,
            clock,
            queue,
            num_victims,
            cursor,
            counters,
            rows,
            fetch_experts,
            fetch_rows,
            num_fetch,
            first,
            num_experts,
            num_slots,
            num_pairs,
            top_k,
            HAS_NUM_TOKENS,
            ONE_USE,
            EXPERTS,
            IDS,
        )
    else:
        if program == 1:
            counts = _count(
                ids, num_tokens, num_pairs, top_k, num_experts, HAS_NUM_TOKENS, EXPERTS, IDS
            )
            _list_active(counts, active, num_active, offsets, num_experts, EXPERTS)
        index = (program - 1) * PAIRS + tl.arange(0, PAIRS)
        expert = _routed_ids(ids, num_tokens, index, num_pairs, top_k, num_experts, HAS_NUM_TOKENS)
        before = tl.zeros([PAIRS, OTHERS], tl.int32)
        for start in range(0, num_pairs, OTHERS):
            other_index = start + tl.arange(0, OTHERS)
            other = _routed_ids(
                ids, num_tokens, other_index, num_pairs, top_k, num_experts, HAS_NUM_TOKENS
            )
            limit = expert[:, None] + (other_index[None, :] < index[:, None]).to(tl.int32)
            before += (other[None, :] < limit).to(tl.int32)
        place = tl.sum(before, axis=1)
        tl.store(pairs + place, index, mask=expert < num_experts)


@triton.jit
def _count(
    ids,
    num_tokens,
    num_pairs,
    top_k,
    num_experts,
    HAS_NUM_TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    IDS: tl.constexpr,
):
    """How many pairs ask for each expert, [EXPERTS] int32."""
    counts = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_pairs, IDS):
        index = start + tl.arange(0, IDS)
        expert = _routed_ids(ids, num_tokens, index, num_pairs, top_k, num_experts, HAS_NUM_TOKENS)
        counts += tl.histogram(expert, EXPERTS, mask=expert < num_experts)
    return counts


@triton.jit
def _list_active(counts, active, num_active, offsets, num_experts, EXPERTS: tl.constexpr):
    """Compact the experts that are asked for, and where each one's pairs start."""
    needed = (counts > 0).to(tl.int32)
    place = tl.cumsum(needed, axis=0) - needed
    ends = tl.cumsum(counts, axis=0)
    expert = tl.arange(0, EXPERTS)
    count = tl.sum(needed, axis=0)
    num_routed = tl.sum(counts, axis=0)
    tl.store(active + place, expert, mask=needed > 0)
    tl.store(offsets + place, ends - counts, mask=needed > 0)
    behind = count + expert
    tl.store(offsets + behind, expert * 0 + num_routed, mask=behind < num_experts)
    tl.store(offsets + num_experts, num_routed)
    tl.store(num_active, count)


@triton.jit
def _look_up(
    ids,
    num_tokens,
    slot_of,
    owner,
    stamp,
    priority,
    clock,
    queue,
    num_victims,
    cursor,
    counters,
    rows,
    fetch_experts,
    fetch_rows,
    num_fetch,
    first,
    num_experts,
    num_slots,
    num_pairs,
    top_k,
    HAS_NUM_TOKENS: tl.constexpr,
    ONE_USE: tl.constexpr,
    EXPERTS: tl.constexpr,
    IDS: tl.constexpr,
):
    """Find each expert that is asked for in a slot, or give it one, or a scratch row."""
    expert = tl.arange(0, EXPERTS)
    exists = expert < num_experts
    slot = tl.load(slot_of + first + expert, mask=exists, other=-1)
    use = tl.load(priority + first + expert, mask=exists, other=0)
    now = tl.load(clock)
    counter = tl.arange(0, 4)
    counted = tl.load(counters + counter)
    counts = _count(ids, num_tokens, num_pairs, top_k, num_experts, HAS_NUM_TOKENS, EXPERTS, IDS)
    needed = counts > 0
    hit = needed & (slot >= 0)
    missing = (needed & (slot < 0)).to(tl.int32)
    num_missing = tl.sum(missing, axis=0)
    num_needed = tl.sum(needed.to(tl.int32), axis=0)
    tl.store(stamp + slot, now, mask=hit)
    tl.store(priority + first + expert, use + ONE_USE, mask=needed)
    tl.store(rows + expert, tl.where(needed, slot, -1), mask=exists & (missing == 0))
    tl.store(num_fetch, num_missing)
    num_seated = num_missing * 0
    if num_missing > 0:
        place = tl.cumsum(missing, axis=0) - missing
        tl.store(fetch_experts + place, expert, mask=missing > 0)
        # Below, other threads read these and the stamps of the hits.
        tl.debug_barrier()
        num_seated = _seat_missing(
            slot_of,
            owner,
            stamp,
            queue,
            num_victims,
            cursor,
            rows,
            fetch_experts,
            fetch_rows,
            now,
            first,
            num_experts,
            num_missing,
            EXPERTS,
        )
        bypass = (missing > 0) & (place >= num_seated)
        row = num_slots + place - num_seated
        tl.store(rows + expert, row, mask=bypass)
        tl.store(fetch_rows + place, row, mask=bypass)
    added = tl.where(counter == 0, num_needed - num_missing, num_missing)
    added = tl.where(counter == 2, num_needed, added)
    added = tl.where(counter == 3, num_missing - num_seated, added)
    tl.store(counters + counter, counted + added)


@triton.jit
def _seat_missing(
    slot_of,
    owner,
    stamp,
    queue,
    num_victims,
    cursor,
    rows,
    fetch_experts,
    fetch_rows,
    now,
    first,
    num_experts,
    num_missing,
    WINDOW: tl.constexpr,
):
    """Give slots from the queue to the experts in fetch_experts, in order; to how many, int32."""
    head = tl.load(cursor)
    end = tl.load(num_victims)
    num_seated = num_missing * 0
    lane = tl.arange(0, WINDOW)
    while (num_seated < num_missing) & (head < end):
        queued = head + lane < end
        slot = tl.load(queue + head + lane, mask=queued, other=0)
        used = tl.load(stamp + slot, mask=queued, other=now)
        old = tl.load(owner + slot, mask=queued, other=-1)
        # Used by the last step, and its layer is still to come in this one: none behind it is free.
        waiting = queued & (used == now - 1) & (old >= first + num_experts)
        num_open = tl.min(tl.where(waiting | (queued == 0), lane, WINDOW), axis=0)
        free = ((lane < num_open) & (used != now)).to(tl.int32)
        place = num_seated + tl.cumsum(free, axis=0) - free
        passed = (lane < num_open) & (place < num_missing)
        taken = passed & (free > 0)
        expert = tl.load(fetch_experts + place, mask=taken, other=0)
        tl.store(slot_of + old, -1, mask=taken & (old >= 0))
        tl.store(slot_of + first + expert, slot, mask=taken)
        tl.store(owner + slot, first + expert, mask=taken)
        tl.store(stamp + slot, now, mask=taken)
        tl.store(rows + expert, slot, mask=taken)
        tl.store(fetch_rows + place, slot, mask=taken)
        num_seated += tl.sum(taken.to(tl.int32), axis=0)
        head += tl.sum(passed.to(tl.int32), axis=0)
        if num_open < WINDOW:
            end = tl.minimum(end, head)
    tl.store(cursor, head)
    return num_seated
