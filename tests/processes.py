"""For tests of whole processes: start one, wait for what it says, see that pids are gone.

Waiting is on descriptors (output, pidfds), never on time passing.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def clean_environment(**extra: str) -> dict[str, str]:
    """Ours without FREETOKEN_* and service manager variables, importing this tree first."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FREETOKEN_", "NOTIFY_", "WATCHDOG_"))
    }
    paths = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    return {**env, "PYTHONPATH": os.pathsep.join(paths), **extra}


def run_python(
    program: str, *arguments: str, timeout_s: float = 60, pass_fds: Sequence[int] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a program's text in an interpreter of its own, which imports this tree."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env=clean_environment(),
        pass_fds=pass_fds,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


class Running:
    """A process under test; stdout and stderr are read as one. Killed at the end if it is there."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env=dict(env or clean_environment()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.output = ""

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(6)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def wait_for(self, pattern: str, timeout_s: float = 20) -> re.Match[str]:
        """The first match of `pattern` in the output, which may have come already."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            found = re.search(pattern, self.output)
            if found:
                return found
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self._read(left_s):
                raise AssertionError(f"no {pattern!r} in:\n{self.output}")

    def wait(self, timeout_s: float) -> int:
        """The exit code; all output has been read then."""
        deadline_s = time.monotonic() + timeout_s
        while self._read(max(0.0, deadline_s - time.monotonic())):
            if time.monotonic() > deadline_s:
                raise AssertionError(f"not ended after {timeout_s} s:\n{self.output}")
        return self.process.wait(max(0.01, deadline_s - time.monotonic()))

    @property
    def last_line(self) -> str:
        return self.output.rstrip("\n").rpartition("\n")[2]

    def _read(self, timeout_s: float) -> bool:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            return True
        data = os.read(self.process.stdout.fileno(), 65536)
        self.output += data.decode()
        return bool(data)


def ft(*arguments: str, **extra: str) -> Running:
    """`ft arguments` from this tree."""
    return Running([sys.executable, "-m", "freetoken.cli", *arguments], clean_environment(**extra))


def is_gone(pid: int, timeout_s: float) -> bool:
    """True if `pid` ends within `timeout_s`; a zombie that waits for its parent counts as ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
