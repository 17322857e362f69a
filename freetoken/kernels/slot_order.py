"""The arithmetic of slot replacement: what an expert's use is worth, and which slot goes first.

Integers only, so that the policy (experts/policy.py), the reference and the device kernels agree
bit for bit, whatever the hardware's exponentials do. Torch-free; kernels are given the constants.

The priority of a (layer, expert) is the number of its uses, each halving in value every 4.1 steps
(LRFU: Lee et al., 2001). Experts that are not in a slot keep theirs. The values were chosen with
tools/replay_policy.py. Hits over LRU's, slots for 25 / 50 / 75 % of the experts: 0.992 / 1.000 /
1.000 where recency is all that counts (lru-stack), 1.000 / 1.043 / 1.011 on recorded routing; a
decay of 1/4 gives 0.997 at 25 % of the first and 1.033 at 50 % of the second, one of 1/8 0.987 and
1.047.
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
# A step replaces at most one in so many of all slots, as long as the last step has left that many
# unused: what a wide step brings in is mostly not used again, and what it evicts was.
SLOTS_PER_REPLACEMENT = 4


def decayed(priority: int) -> int:
    """The priority one step later."""
    rounding = (1 << DECAY_SHIFT) - 1
    return priority - ((priority * DECAY_NUMERATOR + rounding) >> DECAY_SHIFT)


def order_key(layer: int, priority: int, age: int) -> int:
    """Of an occupied slot that was last used `age` steps before the one that ends."""
    if age == 0:
        return KEPT_KEY + (layer << KEPT_LAYER_SHIFT) + (priority >> KEPT_SHIFT)
    return MAX_AGE + priority if priority > 0 else MAX_AGE - min(age, MAX_AGE)


def num_victims(num_slots: int, num_free: int, num_kept: int) -> int:
    """How many slots from the head of the order a step may take.

    num_kept: slots that the last step has used. They are at the end of the order, and out of reach
    unless the others are fewer than a step's share.
    """
    limit = num_free + -(-num_slots // SLOTS_PER_REPLACEMENT)
    return limit if limit <= num_slots - num_kept else num_slots
