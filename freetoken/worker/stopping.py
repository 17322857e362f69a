"""SIGTERM and SIGINT end this process in time, whatever its main thread is doing.

The handler raises Stop in the main thread, which unwinds a load or a step between two operations.
A handler cannot run inside one long operation, so a second thread, woken through the signal wakeup
descriptor, ends the process when that has taken longer than GRACE_S.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

GRACE_S = 4.0
"""Of the five seconds a stop may take."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop(BaseException):
    """We were asked to end. No Exception: no library may swallow it."""


class _Stopper:
    def __init__(self) -> None:
        self._is_stopping = False
        self._done = threading.Event()
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            raise Stop

    def watch(self) -> None:
        if self._read.recv(1) and not self._done.wait(GRACE_S):
            os._exit(0)

    @property
    def wakeup_fd(self) -> int:
        return self._write.fileno()

    def finish(self, watcher: threading.Thread) -> None:
        """Release the watcher: the end of the stream, if it has seen no signal."""
        self._done.set()
        self._write.close()
        watcher.join()
        self._read.close()


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGINT raise Stop, once. Main thread only."""
    stopper = _Stopper()
    old_fd = signal.set_wakeup_fd(stopper.wakeup_fd)
    old = {number: signal.signal(number, stopper.handle) for number in SIGNALS}
    watcher = threading.Thread(target=stopper.watch, name="stop", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(old_fd)
        stopper.finish(watcher)
