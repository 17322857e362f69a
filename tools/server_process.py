"""A server started for a benchmark, and ended with it."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from openai_load import BenchError

END_S = 15.0
POLL_S = 0.25


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def running_server(
    command: Sequence[str],
    url: str,
    *,
    ready_path: str,
    log_file: Path,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Run `command` until the block ends; the block starts when GET `ready_path` answers 200.

    Its output goes to `log_file`. BenchError with the output's last line if it ends or takes longer
    than `timeout_s`.
    """
    with log_file.open("wb") as output:
        try:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        except OSError as error:
            raise BenchError(f"cannot start {command[0]}: {error}") from error
    try:
        _wait_until_ready(process, url + ready_path, log_file, timeout_s)
        yield
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(
    process: subprocess.Popen[bytes], url: str, log_file: Path, timeout_s: float
) -> None:
    deadline_s = time.monotonic() + timeout_s
    while True:
        code = process.poll()
        if code is not None:
            raise BenchError(f"the server ended with code {code}: {_last_line(log_file)}")
        try:
            if httpx.get(url, timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        if time.monotonic() > deadline_s:
            raise BenchError(f"{url} is not ready after {timeout_s:g} s: {_last_line(log_file)}")
        time.sleep(POLL_S)


def _last_line(log_file: Path) -> str:
    lines = log_file.read_text(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "no output")
