"""Tells the threshold what steps have cost. A pass counts as one step, without its pauses."""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.wire.messages import StepMode, StepPlan, StepStats
from freetoken.worker.pending import samples_in
from freetoken.worker.threshold import Threshold

ID_BYTES = 4


@dataclass(slots=True)
class _Cost:
    num_tokens: int = 0
    distinct: int = 0
    step_us: int = 0
    num_bytes: int = 0

    def add(self, num_tokens: int, stats: StepStats) -> None:
        self.num_tokens += num_tokens
        self.distinct += stats.distinct_experts
        self.step_us += stats.step_us
        self.num_bytes += stats.expert_bytes


class StepObserver:
    def __init__(self, threshold: Threshold, num_layers: int) -> None:
        self._threshold = threshold
        self._num_layers = num_layers
        self._pass = _Cost()

    @property
    def max_on_demand_tokens(self) -> int:
        return self._threshold.tokens

    def note(self, plan: StepPlan, stats: StepStats) -> None:
        """A step is done, or a part of a pass."""
        num_bytes = sum(len(extend.token_ids) for extend in plan.extends) + len(plan.decode_rows)
        is_pass = plan.mode is StepMode.PASS
        cost = self._pass if is_pass and plan.layers[0] else _Cost()
        cost.add(num_bytes // ID_BYTES, stats)
        if is_pass:
            self._pass = cost
        if not samples_in(plan, self._num_layers):
            return
        self._threshold.observe(
            cost.num_tokens,
            cost.distinct,
            is_pass=is_pass,
            step_s=cost.step_us / 1e6,
            num_bytes=cost.num_bytes,
        )
