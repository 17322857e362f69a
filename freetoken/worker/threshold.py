"""From how many new tokens on a step is a pass: a rule, and what keeps it true while serving.

A step on demand gathers the missing experts that its tokens ask for; a pass copies all that miss
while it computes. Which is cheaper depends on the link, on how many different experts T tokens ask
for, U(T), on the resident share r, and on what either takes without the link. `E / K` would be a
poor rule: at that T uniform routing asks for 63 % of the experts, and real routing for far fewer.
Torch-free; the runner observes, startup logs.
"""

from __future__ import annotations

import math
from typing import Literal

from freetoken.experts.cost import (
    LAYER_S,
    Link,
    Routed,
    distinct_uniform,
    on_demand_s,
    pass_s,
)

GATHER_RATE = 0.9
"""On a CPU no link is measured: what a gather of rows reaches of a plain copy's rate."""
PASS_LAYER_S = 1e-3
"""What a layer of a small pass costs beside moving bytes: it is launched from Python."""
VRAM_BYTES_S = 800e9
"""Where nothing has been observed: a small card's memory."""
LEARNING_RATE = 1 / 16
MIN_OBSERVATIONS = 3
"""Of a number of tokens, before its times replace the estimate: the first steps compile."""
REFRESH_STEPS = 16
SLOW_GROWTH = 1.02
"""A time is the fastest seen, growing by this when steps are slower: others may use the GPU."""
HIDDEN = 1.05
"""A pass that takes less than this times its copies computes behind them."""


def on_demand_tokens(option: int | Literal["auto"], num_experts: int, top_k: int) -> int:
    """The most extend tokens of an on-demand step on a CPU; `option` is --extend-threshold.

    Only the experts are weighed: T tokens ask for `U(T) = E · (1 - (1 - K/E)^T)` of them.
    """
    if option != "auto":
        return option
    if top_k >= num_experts:
        return 1
    return max(1, int(math.log1p(-GATHER_RATE) / math.log1p(-top_k / num_experts)))


class Threshold:
    """The most extend tokens of a step on demand, refreshed from the steps that are observed.

    `tokens` is announced with each result: at most `max_tokens`, the largest step on demand. A
    number as option stays as it is up to there; `auto` is at least 1.
    """

    def __init__(
        self,
        option: int | Literal["auto"],
        routed: Routed,
        link: Link,
        resident_rate: float,
        max_tokens: int,
        vram_bytes_s: float = VRAM_BYTES_S,
    ) -> None:
        self._option = option
        self._routed = routed
        self._link = link
        self._resident_rate = resident_rate
        self._max_tokens = max_tokens
        self._vram_bytes_s = vram_bytes_s
        # By bucket: T in (2^(i-1), 2^i] has bucket i.
        self._skew: dict[int, float] = {}  # distinct experts over those of uniform routing
        self._resident_s = _Times()
        self._compute_s = _Times()
        self._num_observed = 0
        self.tokens = self._find()

    @property
    def link(self) -> Link:
        return self._link

    def observe(
        self, num_tokens: int, distinct: int, *, is_pass: bool, step_s: float, num_bytes: int
    ) -> None:
        """A step of `num_tokens` new tokens (decode rows included) that asked for `distinct`
        experts, summed over layers, and moved `num_bytes` of them over the link in `step_s`, for a
        pass without its pauses."""
        if self._option != "auto" or num_tokens < 1 or not self._routed.num_layers:
            return
        bucket = _bucket(num_tokens)
        uniform = distinct_uniform(self._routed, num_tokens) * self._routed.num_layers
        skew = min(1.0, distinct / uniform)
        self._skew[bucket] = skew + (1 - LEARNING_RATE) * (self._skew.get(bucket, skew) - skew)
        if is_pass:
            copies_s = num_bytes / self._link.copy_bytes_s
            self._compute_s.add(bucket, step_s if step_s > HIDDEN * copies_s else 0.0)
        else:
            fetches_s = num_bytes / self._link.gather_bytes_s
            self._resident_s.add(bucket, max(0.0, step_s - fetches_s))
        self._num_observed += 1
        if self._num_observed % REFRESH_STEPS == 0:
            self.tokens = self._find()

    def distinct(self, num_tokens: int) -> float:
        """U(T): different experts that T tokens ask for in one layer."""
        skew = 1.0
        if self._skew:
            bucket = _bucket(num_tokens)
            skew = self._skew[min(self._skew, key=lambda seen: (abs(seen - bucket), -seen))]
        return max(
            min(self._routed.top_k, self._routed.num_experts),
            skew * distinct_uniform(self._routed, num_tokens),
        )

    def on_demand_s(self, num_tokens: int) -> float:
        """What a step of T tokens should take on demand."""
        routed, distinct = self._routed, self.distinct(num_tokens)
        resident_s = self._resident_s.get(_bucket(num_tokens))
        if resident_s is None:
            read_s = distinct * routed.expert_bytes / self._vram_bytes_s
            resident_s = routed.num_layers * (LAYER_S + read_s)
        return on_demand_s(routed, self._link, self._resident_rate, distinct, resident_s)

    def pass_s(self, num_tokens: int) -> float:
        """What it should take as a pass."""
        routed = self._routed
        compute_s = self._compute_s.get(_bucket(num_tokens))
        if compute_s is None:
            read_s = routed.num_experts * routed.expert_bytes / self._vram_bytes_s
            compute_s = routed.num_layers * (PASS_LAYER_S + read_s)
        return pass_s(routed, self._link, self._resident_rate, compute_s)

    def describe(self) -> dict[str, object]:
        """For the log: the value and what it was made from."""
        return {
            "extend_threshold": self.tokens,
            "option": self._option,
            "copy_gb_s": round(self._link.copy_bytes_s / 1e9, 1),
            "gather_gb_s": round(self._link.gather_bytes_s / 1e9, 1),
            "resident_rate": round(self._resident_rate, 3),
            "distinct_experts": round(self.distinct(max(1, self.tokens)), 1),
            "on_demand_ms": round(self.on_demand_s(max(1, self.tokens)) * 1e3, 2),
            "pass_ms": round(self.pass_s(max(1, self.tokens)) * 1e3, 2),
        }

    def _find(self) -> int:
        """The last T before a pass is cheaper for the first time."""
        if self._option != "auto":
            return min(self._option, self._max_tokens)
        # Costs jump between buckets only, and grow within one: look at the ends, then inside.
        low, high = 1, 1
        while self._is_cheaper(high):
            low = high
            if high == self._max_tokens:
                return low
            high = min(2 * high, self._max_tokens)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._is_cheaper(middle) else (low, middle)
        return low

    def _is_cheaper(self, num_tokens: int) -> bool:
        return self.on_demand_s(num_tokens) <= self.pass_s(num_tokens)


class _Times:
    """Seconds by bucket: the fastest seen, which grows slowly when steps are slower."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._counts: dict[int, int] = {}

    def add(self, bucket: int, seconds: float) -> None:
        known = self._seconds.get(bucket, math.inf)
        self._seconds[bucket] = min(seconds, known * SLOW_GROWTH)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1

    def get(self, bucket: int) -> float | None:
        """None until there are enough observations."""
        if self._counts.get(bucket, 0) < MIN_OBSERVATIONS:
            return None
        return self._seconds[bucket]


def _bucket(num_tokens: int) -> int:
    return (num_tokens - 1).bit_length()
