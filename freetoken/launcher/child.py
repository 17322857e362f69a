"""One child process: started with our lifeline, its output read, its end explained."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

KEPT_LINES = 40
"""Of a child's last output, to find its reason in."""
MAX_READS = 16
"""At a time, so that a child that writes without end does not keep us from the others."""


@dataclass(frozen=True, slots=True)
class Room:
    """What to start. `max_restarts`: so often within a minute it may end and come again; the
    others go on meanwhile. `standby_argv`: the same, but it only gets ready to begin, and begins at
    a byte on its input; empty: it does not know how to."""

    name: str
    argv: tuple[str, ...]
    max_restarts: int = 0
    standby_argv: tuple[str, ...] = ()


class Child:
    """A running room in a process group of its own, so that Ctrl-C reaches the launcher alone.

    `stands_by`: until `call` it waits to take the place of one that has ended.
    """

    def __init__(
        self,
        room: Room,
        env: Mapping[str, str],
        lifeline: int,
        write_line: Callable[[str], None],
        *,
        stands_by: bool = False,
    ) -> None:
        self.room = room
        self._call_fd: int | None = None
        if stands_by:
            lifeline, self._call_fd = os.pipe()  # a lifeline of its own
        self._write_line = write_line
        self._last: deque[str] = deque(maxlen=KEPT_LINES)
        self._partial = b""
        self._killed_for = ""
        try:
            self._process = subprocess.Popen(
                room.standby_argv if stands_by else room.argv,
                env=dict(env),
                stdin=lifeline,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
                bufsize=0,
            )
        finally:
            if stands_by:
                os.close(lifeline)
        assert self._process.stdout is not None
        self.output_fd = self._process.stdout.fileno()
        os.set_blocking(self.output_fd, False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that killed it."""
        return self._process.poll()

    def call(self) -> None:
        """Let one that stands by begin."""
        assert self._call_fd is not None
        with contextlib.suppress(BrokenPipeError):  # it has just ended, which is noted next
            os.write(self._call_fd, b"\n")

    def pump(self) -> bool:
        """Pass on what it wrote; False at the end of its output."""
        for _ in range(MAX_READS):
            try:
                data = os.read(self.output_fd, 65536)
            except BlockingIOError:
                break
            if not data:
                if self._partial:
                    self._take(self._partial)
                    self._partial = b""
                return False
            *lines, self._partial = (self._partial + data).split(b"\n")
            for line in lines:
                self._take(line)
        return True

    def _take(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self._last.append(text)
        self._write_line(text)

    def send(self, number: signal.Signals) -> None:
        if self.returncode is None:
            self._process.send_signal(number)

    @property
    def is_killed(self) -> bool:
        return bool(self._killed_for)

    def kill(self, why: str) -> None:
        """End it at once, for a reason that `explain_end` will tell."""
        self._killed_for = why
        self.kill_group()

    def kill_group(self) -> None:
        """End it and whatever it started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, deadline_s: float) -> bool:
        """True if it ended before `deadline_s` (time.monotonic)."""
        try:
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Close its output."""
        assert self._process.stdout is not None
        self._process.stdout.close()

    def let_go(self) -> None:
        """Once it has ended."""
        if self._call_fd is not None:
            os.close(self._call_fd)
            self._call_fd = None

    def explain_end(self) -> str:
        """Why it ended, in one line."""
        code = self.returncode
        assert code is not None
        return explain_exit(self.room.name, code, list(self._last), self._killed_for)


def explain_exit(name: str, code: int, last_lines: Sequence[str], killed_for: str = "") -> str:
    """`name` and its own last word: its error line if it wrote one, else how it ended.

    `killed_for`: why we have killed it, if we have.
    """
    own = f"{name}: error: "
    for line in reversed(last_lines):
        if line.startswith(own):
            return f"{name}: {line.removeprefix(own)}"
    if killed_for:
        return f"{name} hung and was killed: {killed_for}"
    if code < 0:
        hint = " (by hand, or by the kernel for want of memory)" if code == -signal.SIGKILL else ""
        return f"{name} was killed by {signal_name(-code)}{hint}"
    words = [line.strip() for line in last_lines if line.strip()]
    return f"{name} ended with exit code {code}" + (f": {words[-1]}" if words and code else "")


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
