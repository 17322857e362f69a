"""The names of `EngineState.counters`, and the totals behind them.

Totals since the scheduler started, except the gauges at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.wire.messages import StepMode, StepResult


@dataclass(slots=True)
class Counters:
    """Each field is a key of `EngineState.counters`."""

    requests: int = 0  # accepted
    requests_refused: int = 0
    requests_finished: int = 0  # stop or length
    requests_aborted: int = 0
    requests_failed: int = 0  # after they were accepted
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts, found in the cache
    output_tokens: int = 0
    preemptions: int = 0
    steps: int = 0  # each part of a pass is one
    steps_pass: int = 0
    passes: int = 0
    steps_failed: int = 0
    step_us: int = 0
    step_us_pass: int = 0  # the part of it that passes took
    slot_hits: int = 0
    slot_misses: int = 0
    cpu_experts: int = 0
    expert_bytes: int = 0
    expert_bytes_pass: int = 0
    distinct_experts: int = 0  # that tokens asked for, once per layer and step
    distinct_experts_pass: int = 0
    malformed_frames: int = 0
    stale_messages: int = 0
    workers_lost: int = 0

    def count(self, result: StepResult) -> None:
        """A step is done."""
        stats = result.stats
        self.steps += 1
        self.step_us += stats.step_us
        self.slot_hits += stats.slot_hits
        self.slot_misses += stats.slot_misses
        self.cpu_experts += stats.cpu_experts
        self.expert_bytes += stats.expert_bytes
        self.distinct_experts += stats.distinct_experts
        if result.mode is StepMode.PASS:
            self.steps_pass += 1
            self.step_us_pass += stats.step_us
            self.expert_bytes_pass += stats.expert_bytes
            self.distinct_experts_pass += stats.distinct_experts


GAUGES = ("pages_free", "pages_cached", "pages_used", "running", "waiting")
"""Present in `EngineState.counters` too, as they are at the moment."""
