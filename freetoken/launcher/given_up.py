"""When a process that the others have given up is to be killed.

Pure; the clock is an argument. Without a heartbeat, or in a step that never ends, a process does
not hear that it should end, nor SIGTERM.
"""

from __future__ import annotations

from freetoken.launcher.health import Health

GRACE_S = 5.0
"""For one that can still end by itself, with its own reason: longer than a worker takes to stop."""


class GivenUp:
    """Told every answer about the server's health."""

    def __init__(self) -> None:
        self._pid = 0
        self._since_s = 0.0

    def find_overdue(self, health: Health | None, now_s: float) -> int | None:
        """The process that was given up at least GRACE_S ago, if any; it may be gone by now."""
        pid = 0 if health is None else health.given_up_pid
        if pid != self._pid:
            self._pid, self._since_s = pid, now_s
        return pid if pid and now_s - self._since_s >= GRACE_S else None
