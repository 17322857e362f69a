"""The arithmetic of slot replacement: what an expert's use is worth, and which slot goes first.

Integers only, so that the policy (experts/policy.py), the reference and the device kernels agree
bit for bit, whatever the hardware's exponentials do. Torch-free; kernels are given the constants.

The priority of a (layer, expert) is the number of its uses, each halving in value every 4.1 steps
(LRFU: Lee et al., 2001). Experts that are not in a slot keep theirs. The values were chosen with
tools/replay_policy.py: 5/32 gives 0.99 of LRU's hits where recency is all that counts (LRU-stack
traces) and 1.0 to 1.02 of them on recorded routing; 1/4 gives 0.996 and 1.0 to 1.015, 1/8 0.984 and
1.0 to 1.03.
"""

from __future__ import annotations

# One use. A priority stays below 32/5 of it, times 5 below 2³¹.
ONE_USE = 1 << 24
# A step takes this part of every priority, rounded up: one use is forgotten after 91 steps.
DECAY_NUMERATOR, DECAY_SHIFT = 5, 5
# Order keys, the smaller goes first, then the lower slot: free slots, those of priority 0 by age
# (to MAX_AGE steps), others by priority, and last the slots that the step just ended has used, by
# layer and then by priority without its last KEPT_SHIFT bits.
FREE_KEY = -1
MAX_AGE = 1 << 20
KEPT_KEY = 1 << 27
KEPT_LAYER_SHIFT = 17
KEPT_SHIFT = 10
# Of the slots that the last step has not used, a step takes at most one in so many of all: what a
# wide step brings in is mostly not used again, and what it evicts was.
SLOTS_PER_REPLACEMENT = 8


def decayed(priority: int) -> int:
    """The priority one step later."""
    rounding = (1 << DECAY_SHIFT) - 1
    return priority - ((priority * DECAY_NUMERATOR + rounding) >> DECAY_SHIFT)


def order_key(layer: int, priority: int, age: int) -> int:
    """Of an occupied slot that was last used `age` steps before the one that ends."""
    if age == 0:
        return KEPT_KEY + (layer << KEPT_LAYER_SHIFT) + (priority >> KEPT_SHIFT)
    return MAX_AGE + priority if priority > 0 else MAX_AGE - min(age, MAX_AGE)


def max_replaced(num_slots: int) -> int:
    """Slots unused in the last step that one step may take; free ones do not count."""
    return -(-num_slots // SLOTS_PER_REPLACEMENT)
