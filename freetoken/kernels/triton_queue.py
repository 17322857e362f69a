"""Puts the victims of the next step in order, on a GPU. See reference_slots.build_queue."""

from __future__ import annotations

import triton
import triton.language as tl

from freetoken.kernels.slot_order import (
    DECAY_NUMERATOR,
    DECAY_SHIFT,
    FREE_KEY,
    KEPT_KEY,
    KEPT_LAYER_SHIFT,
    KEPT_SHIFT,
    MAX_AGE,
    SLOTS_PER_REPLACEMENT,
)
from freetoken.kernels.slot_tables import SlotTables

SLOT_BLOCK, KEY_BLOCK = 32, 256
MAX_INT = tl.constexpr(2**31 - 1)


def build_queue(tables: SlotTables) -> None:
    """See slot_ops.build_queue. Two launches."""
    num_slots = tables.num_slots
    grid = (max(1, triton.cdiv(num_slots, KEY_BLOCK)),)
    _order_keys[grid](
        tables.owner,
        tables.stamp,
        tables.priority,
        tables.clock,
        tables.keys,
        num_slots,
        tables.num_experts,
        FREE_KEY=FREE_KEY,
        MAX_AGE=MAX_AGE,
        KEPT_KEY=KEPT_KEY,
        KEPT_LAYER_SHIFT=KEPT_LAYER_SHIFT,
        KEPT_SHIFT=KEPT_SHIFT,
        BLOCK=KEY_BLOCK,
    )
    grid = (max(1, triton.cdiv(num_slots, SLOT_BLOCK)),)
    _order_queue[grid](
        tables.keys,
        tables.queue,
        tables.num_victims,
        tables.cursor,
        tables.clock,
        tables.priority,
        num_slots,
        tables.num_layers * tables.num_experts,
        FREE_KEY=FREE_KEY,
        KEPT_KEY=KEPT_KEY,
        SHARE=SLOTS_PER_REPLACEMENT,
        NUMERATOR=DECAY_NUMERATOR,
        SHIFT=DECAY_SHIFT,
        SLOTS=SLOT_BLOCK,
        BLOCK=KEY_BLOCK,
    )


@triton.jit
def _order_keys(
    owner,
    stamp,
    priority,
    clock,
    keys,
    num_slots,
    num_experts,
    FREE_KEY: tl.constexpr,
    MAX_AGE: tl.constexpr,
    KEPT_KEY: tl.constexpr,
    KEPT_LAYER_SHIFT: tl.constexpr,
    KEPT_SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """slot_order.order_key of each slot."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = slot < num_slots
    number = tl.load(owner + slot, mask=exists, other=-1)
    age = tl.load(clock) - tl.load(stamp + slot, mask=exists, other=0)
    use = tl.load(priority + number, mask=number >= 0, other=0)
    aged = MAX_AGE - tl.minimum(age, MAX_AGE).to(tl.int32)
    kept = KEPT_KEY + ((number // num_experts) << KEPT_LAYER_SHIFT) + (use >> KEPT_SHIFT)
    key = tl.where(use > 0, MAX_AGE + use, aged)
    key = tl.where(age == 0, kept, key)
    key = tl.where(number < 0, FREE_KEY, key)
    tl.store(keys + slot, key, mask=exists)


@triton.jit
def _order_queue(
    keys,
    queue,
    num_victims,
    cursor,
    clock,
    priority,
    num_slots,
    num_priorities,
    FREE_KEY: tl.constexpr,
    KEPT_KEY: tl.constexpr,
    SHARE: tl.constexpr,
    NUMERATOR: tl.constexpr,
    SHIFT: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sort by counting: each slot's place is the number of smaller keys. Also ends the step."""
    program = tl.program_id(0)
    slot = program * SLOTS + tl.arange(0, SLOTS)
    key = tl.load(keys + slot, mask=slot < num_slots, other=MAX_INT)
    smaller = tl.zeros([SLOTS, BLOCK], tl.int32)
    free = tl.zeros([BLOCK], tl.int32)
    kept = tl.zeros([BLOCK], tl.int32)
    own = program * SLOTS // BLOCK * BLOCK
    for start in range(0, num_slots, BLOCK):
        other_slot = start + tl.arange(0, BLOCK)
        other = tl.load(keys + other_slot, mask=other_slot < num_slots, other=MAX_INT)
        # A tie goes to the lower slot.
        limit = key + (start < own).to(tl.int32)
        smaller += (other[None, :] < limit[:, None]).to(tl.int32)
        free += (other == FREE_KEY).to(tl.int32)
        kept += ((other >= KEPT_KEY) & (other < MAX_INT)).to(tl.int32)
    other_slot = own + tl.arange(0, BLOCK)
    other = tl.load(keys + other_slot, mask=other_slot < num_slots, other=MAX_INT)
    ties = (other[None, :] == key[:, None]) & (other_slot[None, :] < slot[:, None])
    place = tl.sum(smaller + ties.to(tl.int32), axis=1)
    tl.store(queue + place, slot, mask=slot < num_slots)
    for start in range(program * BLOCK, num_priorities, tl.num_programs(0) * BLOCK):
        number = start + tl.arange(0, BLOCK)
        old = tl.load(priority + number, mask=number < num_priorities, other=0)
        lost = (old * NUMERATOR + ((1 << SHIFT) - 1)) >> SHIFT
        tl.store(priority + number, old - lost, mask=number < num_priorities)
    if program == 0:
        limit = tl.sum(free, axis=0) + tl.cdiv(num_slots, SHARE)
        end = tl.where(limit <= num_slots - tl.sum(kept, axis=0), limit, num_slots)
        tl.store(num_victims, end)
        tl.store(cursor, 0)
        tl.store(clock, tl.load(clock) + 1)
