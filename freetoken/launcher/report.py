"""What people see while a server starts: phases with seconds, then where it is and how to ask it.

On a terminal the running phase is one line that is rewritten; elsewhere a line per phase, and one
every PROGRESS_S while a phase lasts. The processes' own log lines go through here too, so that the
two do not mix.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable
from typing import TextIO

from freetoken.launcher.health import WILDCARDS, Health
from freetoken.wire.messages import Phase

PROGRESS_S = 5.0
REDRAW_S = 0.2
MIN_SPEED_S = 0.5
"""Health is asked ten times a second: the speed of less is noise."""
CLEAR_LINE = "\r\x1b[2K"


class Report:
    """`out` gets the phases, `err` the processes' logs."""

    def __init__(self, out: TextIO, err: TextIO, clock: Callable[[], float]) -> None:
        self._out = out
        self._err = err
        self._clock = clock
        self._is_terminal = out.isatty()
        self._started_s = self._phase_s = self._drawn_s = self._load_s = clock()
        self._phase: Phase | None = None
        self._loaded_bytes = 0
        self._drawn = ""

    def title(self, text: str) -> None:
        self._print(text)

    def step(self, what: str, seconds: float, detail: str = "") -> None:
        """Something that is done."""
        self._print(f"  {what:<9} {seconds:6.1f} s  {detail}".rstrip())

    def log_line(self, line: str) -> None:
        """A line of a process."""
        self._clear()
        _write(self._err, line + "\n")
        self._redraw()

    def progress(self, health: Health) -> None:
        """The state while starting; a phase that ended gets its line."""
        if health.phase != self._phase:
            self.end_phase()
            self._phase = health.phase
            self._phase_s = self._drawn_s = self._clock()
            self._loaded_bytes = 0
        if not health.loaded_bytes and not self._loaded_bytes:
            self._load_s = self._clock()
        self._loaded_bytes = health.loaded_bytes or self._loaded_bytes
        elapsed_s = self._clock() - self._drawn_s
        if elapsed_s < (REDRAW_S if self._is_terminal else PROGRESS_S):
            return
        self._drawn_s = self._clock()
        seconds = self._clock() - self._phase_s
        done = ""
        if health.total_bytes and health.phase == Phase.LOADING:
            share = f"{show_bytes(health.loaded_bytes)} of {show_bytes(health.total_bytes)}"
            done = f"{share}{self._speed()}  "
        line = f"  {health.phase:<9} {seconds:6.1f} s  {done}{health.detail}".rstrip()
        if self._is_terminal:
            self._drawn = line
            self._redraw()
        else:
            self._print(f"{line} …")

    def end_phase(self) -> None:
        """Print the line of the phase that was under way, if any."""
        if self._phase is None or self._phase == Phase.READY:
            return
        loaded = ""
        if self._phase == Phase.LOADING:
            loaded = show_bytes(self._loaded_bytes) + self._speed()
        self.step(self._phase, self._clock() - self._phase_s, loaded)
        self._phase = None

    def _speed(self) -> str:
        """Of loading so far; empty while too little has come to tell."""
        seconds = self._clock() - self._load_s
        if seconds < MIN_SPEED_S or not self._loaded_bytes:
            return ""
        return f"  {show_bytes(int(self._loaded_bytes / seconds))}/s"

    def ready(self, health: Health, text: str) -> None:
        self.end_phase()
        self._phase = Phase.READY
        self.step("ready", self._clock() - self._started_s, "in all")
        self._print(text)

    def _print(self, text: str) -> None:
        self._clear()
        self._drawn = ""
        _write(self._out, text + "\n")

    def _clear(self) -> None:
        if self._drawn:
            _write(self._out, CLEAR_LINE)

    def _redraw(self) -> None:
        if self._drawn:
            _write(self._out, CLEAR_LINE + self._drawn[:100])


def _write(stream: TextIO, text: str) -> None:
    """A reader that went away (`ft serve | head`, a closed terminal) does not end the server."""
    with contextlib.suppress(OSError, ValueError):
        stream.write(text)
        stream.flush()


def show_bytes(count: int) -> str:
    """Decimal units, as disks and downloads are measured."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def base_url(host: str, port: int) -> str:
    """Of a server that listens on `host`, for a client on this machine."""
    name = WILDCARDS.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def describe_server(health: Health, url: str, *, has_key: bool, can_chat: bool) -> str:
    """URL, context, and a command that asks for text; the key itself is never shown."""
    lines = [
        "",
        f"{health.model} is served at {url}/v1",
        f"effective context: {health.context_tokens} tokens per request",
        "",
        "try it:",
        "  " + curl_line(health.model, url, has_key=has_key, can_chat=can_chat),
        "",
    ]
    if has_key:
        lines.insert(-1, "  (FREETOKEN_API_KEY must hold the key)")
    return "\n".join(lines)


def curl_line(model: str, url: str, *, has_key: bool, can_chat: bool) -> str:
    """For a POSIX shell."""
    question = "Why is the sky blue?"
    body: dict[str, object] = {"model": model, "max_tokens": 100}
    if can_chat:
        body["messages"] = [{"role": "user", "content": question}]
    else:
        body["prompt"] = question
    path = "chat/completions" if can_chat else "completions"
    key = ' -H "Authorization: Bearer $FREETOKEN_API_KEY"' if has_key else ""
    return (
        f"curl {url}/v1/{path} -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(json.dumps(body))}"
    )
