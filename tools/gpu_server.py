"""`ft serve` as the GPU benchmark needs it: timed until ready, its worker killed, its log read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
from openai_load import BenchError

ROOT = Path(__file__).parent.parent
TRACER = ROOT / "tools" / "trace_worker"
TRACE_VARIABLE = "BENCH_TRACE_FILE"  # twin: VARIABLE in trace_worker/sitecustomize.py
END_S = 20.0
POLL_S = 0.1
# What is worth showing of a server's log.
TELLING = re.compile(
    r"resolved|effective KV|weights\.read|bank\.|pinned|memory\.|threshold |slots\.grown|\.done |"
    r"ready_again|cuda\.|WARNING|ERROR"
)


class GpuServer:
    """A server that is ready. `ready_s`: from its start to then."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path, trace: Path) -> None:
        self.url = url
        self.ready_s = 0.0
        self._process = process
        self._log = log
        self._trace = trace

    def wait_until_ready(self, timeout_s: float) -> float:
        """Seconds it took; BenchError if it ends or takes longer."""
        started_s = time.monotonic()
        while not self.is_ready():
            waited_s = time.monotonic() - started_s
            if self._process.poll() is not None:
                raise BenchError(f"the server ended with code {self._process.returncode}")
            if waited_s > timeout_s:
                raise BenchError(f"the server is not ready after {timeout_s:.0f} s")
            time.sleep(POLL_S)
        return time.monotonic() - started_s

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health/ready", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def complete(self, prompt: str, max_tokens: int) -> str:
        """A greedy completion; BenchError if there is none."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        try:
            answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        except httpx.HTTPError as error:
            raise BenchError(f"no completion: {error!r}") from error
        if answer.status_code != 200:
            raise BenchError(f"no completion: {answer.text[:200]}")
        return str(answer.json()["choices"][0]["text"])

    def kill_worker(self) -> None:
        """As if it had crashed. Returns when it is gone."""
        for child in psutil.Process(self._process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "freetoken-worker" in " ".join(child.cmdline()):
                    child.kill()
                    child.wait(30)
                    return
        raise BenchError("the server has no process freetoken-worker")

    def start_trace(self, seconds: float) -> None:
        """Let the worker note for so long when its steps run on the device."""
        partial = self._trace.with_suffix(".new")
        partial.write_text(f"{seconds}")
        partial.rename(self._trace.with_suffix(".go"))

    def read_trace(self, timeout_s: float = 60.0) -> list[tuple[int, int]]:
        """(start, end) in ns of each step, sorted; waits for it."""
        deadline_s = time.monotonic() + timeout_s
        while not self._trace.exists():
            if time.monotonic() > deadline_s:
                raise BenchError(f"the worker has written no trace within {timeout_s:.0f} s")
            time.sleep(POLL_S)
        return [(start, end) for start, end in json.loads(self._trace.read_text())]

    def telling_lines(self) -> list[str]:
        lines = self._log.read_text(errors="replace").splitlines()
        return [line for line in lines if TELLING.search(line)]


@contextmanager
def gpu_server(
    model: Path, options: Sequence[str], port: int, log: Path, timeout_s: float
) -> Iterator[GpuServer]:
    """Serve `model` until the block ends, which begins when it is ready. It can be traced once."""
    command = [sys.executable, "-m", "freetoken.cli", "serve", str(model), "--port", str(port)]
    environment = dict(os.environ)
    trace = log.with_suffix(".trace")
    environment[TRACE_VARIABLE] = str(trace)
    paths = [str(TRACER), str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *options], stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    server = GpuServer(process, f"http://127.0.0.1:{port}", log, trace)
    try:
        server.ready_s = server.wait_until_ready(timeout_s)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
