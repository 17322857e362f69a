"""In a child: end when the launcher is gone, however it went.

Every child's standard input is a pipe that only the launcher can write to, and does once at most,
to one that stands by. Its end of file means that the launcher is dead; then the child asks itself
to end cleanly and, since a process deep in C code may not hear that, has the kernel end it after
GRACE_S. On Linux a child that leaves nothing behind is moreover killed by the kernel at once
(PR_SET_PDEATHSIG, prctl(2)).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

GRACE_S = 1.5
PR_SET_PDEATHSIG = 1

_called = threading.Event()


def end_with_launcher(launcher_pid: int, *, leaves_files: bool) -> None:
    """Call first thing in a child's main thread. `leaves_files`: it wants to clean up after us."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if sys.platform == "linux" and not leaves_files:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_wait_for_end_of_input, name="launcher", daemon=True).start()
    if is_launcher_gone(launcher_pid):  # before the line above could see it
        _end()


def await_call() -> None:
    """In a child that stands by: until the launcher wants it. `end_with_launcher` came before."""
    _called.wait()


def is_launcher_gone(launcher_pid: int) -> bool:
    """True once this process was handed to another parent."""
    return os.getppid() != launcher_pid


def _wait_for_end_of_input() -> None:
    while os.read(0, 4096):
        _called.set()
    _end()


def _end() -> None:
    signal.setitimer(signal.ITIMER_REAL, GRACE_S)
    os.kill(os.getpid(), signal.SIGTERM)
