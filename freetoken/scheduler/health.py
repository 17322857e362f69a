"""The engine's phase as clients see it, and when to probe. Pure; the clock is an argument.

Ready means that a token has come through this worker, and none is overdue. The probe is a
generation of one token of our own: once before the first READY, then whenever nothing else has
proved the engine alive for PROBE_AFTER_S.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from freetoken.wire.messages import Phase

PROBE_AFTER_S = 10.0
PROBE_RETRY_S = 1.0
HUNG_RATE = 3
"""A step that takes so many stall limits will not end."""


@dataclass(frozen=True, slots=True)
class Status:
    """What `EngineState` says; progress in bytes."""

    phase: Phase
    detail: str
    loaded_bytes: int = 0
    total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Signs:
    """What there is to see: of the scheduler, and the worker's last beat."""

    has_worker: bool  # ready to run steps
    num_open: int
    oldest_step_s: float | None  # since when the next result is awaited
    last_token_s: float | None  # of this worker


class Health:
    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._next_probe_s = 0.0
        self._failure = ""  # why the last probe brought nothing
        self._is_doubtful = False  # a step has failed since the last one that did not
        self._loading = Status(Phase.STARTING, "waiting for a worker")
        self._death: str | None = None

    def connected(self) -> None:
        """A worker said hello."""
        self._death = None
        self._failure = ""
        self._is_doubtful = False
        self._next_probe_s = 0.0
        self._loading = Status(Phase.STARTING, "the worker is starting")

    def note_progress(self, status: Status) -> None:
        """What a worker's heartbeat says; whether it is ready, its WorkerReady says."""
        before_ready = (Phase.STARTING, Phase.LOADING, Phase.CHECKING)
        if status.phase not in before_ready:
            status = replace(status, phase=Phase.CHECKING)
        self._loading = status

    def lost(self, reason: str) -> None:
        self._death = reason

    def note_step(self, error: str | None, was_probe: bool) -> None:
        """A step is back. One that fails with a request says little; the probe must pass."""
        self._is_doubtful = error is not None
        if error is None:
            self._failure = ""
        elif was_probe:
            self._failure = error

    def status(self, signs: Signs, now_s: float) -> Status:
        if self._death is not None:
            return Status(Phase.DEAD, self._death)
        if not signs.has_worker:
            return self._loading
        since_s = signs.oldest_step_s
        if since_s is not None and self.is_overdue(since_s, now_s):
            return Status(Phase.STALLED, f"a step is out for {now_s - since_s:.0f} s")
        if signs.last_token_s is None:
            detail = f"probe failed: {self._failure}" if self._failure else "first token"
            return Status(Phase.CHECKING, detail)
        if self._failure:
            return Status(Phase.STALLED, f"probe failed: {self._failure}")
        return Status(Phase.READY, "")

    def is_overdue(self, since_s: float, now_s: float) -> bool:
        """A step whose result is awaited since then should have been back."""
        return now_s - since_s > self._stall_timeout_s

    def is_hung(self, since_s: float, now_s: float) -> bool:
        """Its worker is to be given up."""
        return now_s - since_s > HUNG_RATE * self._stall_timeout_s

    def must_probe(self, signs: Signs, now_s: float) -> bool:
        """True when a probe should be sent now; counts it as sent."""
        if not signs.has_worker or signs.num_open or now_s < self._next_probe_s:
            return False
        last_s = signs.last_token_s
        if last_s is not None and not self._is_doubtful and now_s - last_s < PROBE_AFTER_S:
            return False
        self._next_probe_s = now_s + PROBE_RETRY_S
        return True
