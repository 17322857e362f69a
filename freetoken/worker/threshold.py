"""From how many new tokens on a step is a pass: a pure rule.

A step on demand loads the missing experts that its tokens ask for; a pass loads all that miss, in
larger copies. With experts missing evenly, T tokens under uniform routing ask for
`U(T) = E · (1 - (1 - K/E)^T)` experts of a layer, and the missing ones among them are the same
share of all missing ones. On demand is cheaper while that share is below what a gather moves in the
time a plain copy moves everything. `E / K` would be 2.3 times too low: there the share is 63 %.
"""

from __future__ import annotations

import math
from typing import Literal

GATHER_RATE = 0.9
"""Bytes per second of gathering scattered experts over those of copying whole layers (H200 over
PCIe 5 x16: 50.5 against 55.5 GB/s, 2026-12-01). No link is measured yet, so it is assumed."""


def on_demand_tokens(option: int | Literal["auto"], num_experts: int, top_k: int) -> int:
    """The most extend tokens of an on-demand step; `option` is --extend-threshold."""
    if option != "auto":
        return option
    if top_k >= num_experts:
        return 1
    return max(1, int(math.log1p(-GATHER_RATE) / math.log1p(-top_k / num_experts)))
