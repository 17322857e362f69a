"""The names of `EngineState.counters`, and the totals behind them.

Totals since the scheduler started, except the gauges at the end.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    steps: int = 0
    steps_pass: int = 0
    steps_failed: int = 0
    step_us: int = 0
    slot_hits: int = 0
    slot_misses: int = 0
    cpu_experts: int = 0
    expert_bytes: int = 0
    malformed_frames: int = 0
    stale_messages: int = 0
    workers_lost: int = 0


GAUGES = ("pages_free", "pages_cached", "pages_used", "running", "waiting")
"""Present in `EngineState.counters` too, as they are at the moment."""
