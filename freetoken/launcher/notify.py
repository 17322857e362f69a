"""The service manager's notification protocol (sd_notify(3)): a datagram to $NOTIFY_SOCKET."""

from __future__ import annotations

import os
from collections.abc import Mapping

from freetoken.wire.service import send_notification


class Notifier:
    """Silent when no service manager asked. `watchdog_s`: it wants a sign of life so often."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self.watchdog_s = _watchdog_s(environ)

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={_one_line(status)}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={_one_line(status)}")

    def stopping(self, status: str) -> None:
        self._send(f"STOPPING=1\nSTATUS={_one_line(status)}")

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        send_notification(self._address, text)


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    """Half of WATCHDOG_USEC, as sd_watchdog_enabled(3) advises; None if it is not meant for us."""
    wanted_us = environ.get("WATCHDOG_USEC", "")
    if not wanted_us.isdigit() or int(wanted_us) == 0:
        return None
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(wanted_us) / 1e6 / 2


def _one_line(text: str) -> str:
    return " ".join(text.split())
