#!/usr/bin/env python3
"""Measure FreeToken on a GPU through HTTP, and hold it to what link and arithmetic allow.

    python tools/bench_gpu.py --shape qwen3 --json out.json

Makes a random checkpoint of 20 GB, serves it with slots for all, half, three quarters and a quarter
of its experts, and measures with bench_serve's scenarios: decoding, extends of a cached prefix,
fresh prompts; with bench_fair's a long prompt beside a stream; then a killed worker's return, the
link and the slot kernels, and how busy the GPU is while it decodes. Each part that fails says why,
shows the server's last lines, and the others go on. Figures are printed, and written to --json, as
they come.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench_fair import Fairness, FairPlan, measure, show
from bench_report import print_tables, to_json
from bench_scenarios import Plan, Results, run_plan
from gpu_busy import BusyMeter, idle_share
from gpu_report import cells_of, print_rows
from gpu_server import ROOT, GpuServer, gpu_server
from gpu_targets import (
    Row,
    Speeds,
    bank_bytes,
    decode_rows,
    expert_bytes,
    extend_rows,
    fair_rows,
    find_all_hit,
    fresh_rows,
    kernel_rows,
    policy_rows,
)
from make_moe import SHAPES, MoeShape
from openai_load import Server
from rich.console import Console

PARTS = ("kernels", "decode", "extend", "fresh", "fair", "busy", "restart", "policy")
RATES = (1.0, 0.5, 0.75, 0.25)
ALL_RATE = 1.0  # every expert has a slot: what a step takes without misses
RESTART_RATE = FAIR_RATE = 0.5
RESTART_LIMIT_S = 15.0
RESTART_PROMPT = "~" * 8  # no other prompt begins so: no prefix of it is cached, before or after
IDLE_LIMIT = 0.03
TIMEOUT_S = 240.0
BUSY_TOKENS = 4096
FAIR_TOKENS = 768  # a stream that outlasts the long prompt
TRACE_S = 1.0
TRACE_DELAY_S = 2.0
WARM_TOKENS = 256
MISS_TOKENS = 48
PLAN = Plan(
    lengths=(),
    extends=(),
    prefix_tokens=2048,
    concurrency=(),
    temperatures=(),
    decode_prompt_tokens=64,
    max_tokens=96,
    repeats=3,
    seed=1,
)
DECODE = replace(PLAN, temperatures=(1.0,))


class Bench:
    """One shape; collects rows, and all that was measured for the JSON file."""

    def __init__(self, name: str, options: argparse.Namespace, console: Console) -> None:
        self.name = name
        self.shape = _with_layers(SHAPES[name], options.layers)
        self.rows: list[Row] = []
        self.raw: dict[str, Any] = {"shape": asdict(self.shape), "parts": {}}
        self._options = options
        self._console = console
        self._speeds = Speeds()
        self._all_hit: dict[tuple[int, float], float] = {}
        self._started_s = time.monotonic()
        self._logs = Path(tempfile.mkdtemp(prefix="bench-gpu-"))

    def run(self) -> None:
        policy = self._start_policy() if "policy" in self._options.only else None
        model = self._directory() / f"{self.name}-{self.shape.layers}"
        if self._try("checkpoint", lambda: self._make(model)):
            if "kernels" in self._options.only:
                self._try("kernels", self._kernels)
            for rate in self._options.rates:
                self._serve(model, rate)
        if policy is not None:
            self._try("policy", lambda: self._finish_policy(*policy))
        if not self._options.keep:
            shutil.rmtree(model, ignore_errors=True)

    # ---- parts

    def _make(self, model: Path) -> None:
        if (model / "generation_config.json").exists():  # written last
            self.say(f"{model} is there")
            return
        shutil.rmtree(model, ignore_errors=True)
        command = [sys.executable, str(ROOT / "tools" / "make_moe.py"), str(model)]
        command += ["--shape", self.name, "--layers", str(self.shape.layers)]
        started_s = time.monotonic()
        subprocess.run(command, check=True, capture_output=True, text=True)
        self.say(
            f"{model}: {bank_bytes(self.shape) / 1e9:.1f} GB of experts, made in "
            f"{time.monotonic() - started_s:.0f} s"
        )

    def _kernels(self) -> None:
        command = [sys.executable, str(ROOT / "tools" / "gpu_kernels.py")]
        command += ["--experts", str(self.shape.experts), "--top-k", str(self.shape.top_k)]
        command += ["--row-bytes", str(expert_bytes(self.shape))]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        figures = json.loads(done.stdout.splitlines()[-1])
        self.raw["parts"]["kernels"] = figures
        self._speeds = Speeds(figures["copy_gb_s"], figures["gather_gb_s"])
        self.say(f"on {figures['device']}")
        self._add(kernel_rows(figures))

    def _serve(self, model: Path, rate: float) -> None:
        options = ["--moe-cache-rate", str(rate), "--worker-restarts", "1"]
        options += self._options.serve_args.split()
        log = self._logs / f"{self.name}-{rate:g}.log"

        def measure() -> None:
            with gpu_server(model, options, self._options.port, log, TIMEOUT_S) as server:
                self.say(f"slots {rate:.0%}: ready after {server.ready_s:.1f} s")
                for line in server.telling_lines():
                    self.say(f"  {line[:240]}")
                self.raw["parts"][f"ready-{rate:g}"] = server.ready_s
                self._measure(server, rate)

        self._try(f"slots {rate:.0%}", measure, log)

    def _measure(self, server: GpuServer, rate: float) -> None:
        log = self._logs / f"{self.name}-{rate:g}.log"
        only = set(self._options.only)
        if rate == ALL_RATE:
            only &= {"decode", "busy"}
        parts: list[tuple[str, Callable[[], None]]] = [
            ("decode", lambda: self._decode(server, rate)),
            ("extend", lambda: self._extend(server, rate)),
            ("fresh", lambda: self._fresh(server, rate)),
        ]
        if rate == FAIR_RATE:
            parts.append(("fair", lambda: self._fair(server, rate)))
        if rate == self._options.rates[0]:  # the first, which has most slots by default
            parts.append(("busy", lambda: self._busy(server, rate)))
        if rate == RESTART_RATE:
            parts.append(("restart", lambda: self._restart(server)))
        for name, part in parts:
            if name in only:
                self._try(f"{name}, slots {rate:.0%}", part, log)

    def _decode(self, server: GpuServer, rate: float) -> None:
        is_all = rate == ALL_RATE
        # Fills the slots, which are empty at first and which passes leave as they are.
        warm = WARM_TOKENS if is_all else MISS_TOKENS
        self._bench(server, replace(DECODE, concurrency=(8,), max_tokens=warm, repeats=1))
        plan = replace(DECODE, temperatures=(0.0, 1.0))
        if not is_all:  # a step may take 100 ms
            plan = replace(plan, max_tokens=MISS_TOKENS, repeats=2)
        for streams in self._options.streams:
            results = self._bench(server, replace(plan, concurrency=(streams,)))
            self.raw["parts"][f"decode-{streams}-{rate:g}"] = to_json(results)
            if is_all:
                self._all_hit |= find_all_hit(results.decode)
            self._add(decode_rows(results.decode, self.shape, rate, self._speeds, self._all_hit))

    def _extend(self, server: GpuServer, rate: float) -> None:
        for extend in self._options.extends:
            results = self._bench(server, replace(PLAN, extends=(extend,)))
            self.raw["parts"][f"extend-{extend}-{rate:g}"] = to_json(results)
            self._add(extend_rows(results.extend, self.shape, rate, self._speeds, self._all_hit))

    def _fresh(self, server: GpuServer, rate: float) -> None:
        for length in self._options.lengths:
            results = self._bench(server, replace(PLAN, lengths=(length,)))
            self.raw["parts"][f"fresh-{length}-{rate:g}"] = to_json(results)
            self._add(fresh_rows(results.fresh, self.shape, rate, self._speeds))

    def _fair(self, server: GpuServer, rate: float) -> None:
        plan = FairPlan(self._options.lengths[-1], stream_tokens=FAIR_TOKENS, repeats=2)

        async def run() -> list[Fairness]:
            async with Server(server.url, timeout_s=120) as client:
                return await measure(client, plan, random.Random())

        results = asyncio.run(run())
        self.raw["parts"][f"fair-{rate:g}"] = [asdict(result) for result in results]
        self.say(show(results))
        self._add(fair_rows(results, rate))

    def _busy(self, server: GpuServer, rate: float) -> None:
        plan = replace(
            DECODE, concurrency=(1,), temperatures=(0.0,), repeats=1, max_tokens=BUSY_TOKENS
        )
        try:
            meter = BusyMeter()
        except ImportError:
            self.say("no NVML: nvidia-ml-py is not installed")
        else:
            with meter:
                results = self._bench(server, plan, settle_s=0.0)
            share = meter.share(results.decode[0].gap_ms[0] * BUSY_TOKENS / 1e3)
            self._add([Row("GPU without work while decoding, by NVML", "", 1 - share)])
        timer = threading.Timer(TRACE_DELAY_S, server.start_trace, (TRACE_S,))
        timer.start()  # in the middle of the stream
        self._bench(server, plan, settle_s=0.0)
        spans = server.read_trace()
        step_us = median(end - start for start, end in spans) / 1e3
        title = f"GPU idle between decode steps, slots {rate:.0%}"
        note = f"{len(spans)} steps of {step_us:.0f} µs, by events around each"
        self._add([Row(title, "", idle_share(spans), None, IDLE_LIMIT, note=note)])

    def _restart(self, server: GpuServer) -> None:
        text = server.complete(RESTART_PROMPT, 8)
        server.kill_worker()
        started_s = time.monotonic()
        while server.is_ready() and time.monotonic() - started_s < 10:
            time.sleep(0.02)
        server.wait_until_ready(TIMEOUT_S)
        again = server.complete(RESTART_PROMPT, 8)
        seconds = time.monotonic() - started_s
        note = "same text" if again == text else f"another text: {text!r}, then {again!r}"
        self._add(
            [Row("killed worker ready again", "s", seconds, None, RESTART_LIMIT_S, note=note)]
        )

    def _start_policy(self) -> tuple[subprocess.Popen[str], Path]:
        file = self._logs / "policy.json"
        command = [sys.executable, str(ROOT / "tools" / "replay_policy.py"), "--json", str(file)]
        with (self._logs / "policy.log").open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, text=True)
        return process, file

    def _finish_policy(self, process: subprocess.Popen[str], file: Path) -> None:
        try:
            process.wait(60)
        finally:
            process.kill()
        self.raw["parts"]["policy"] = figures = json.loads(file.read_text())
        self._add(policy_rows(figures))

    # ---- how

    def _bench(self, server: GpuServer, plan: Plan, settle_s: float = 0.6) -> Results:
        plan = replace(plan, repeats=min(plan.repeats, self._options.repeats))
        plan = replace(plan, seed=random.randrange(1 << 30))

        async def run() -> Results:
            async with Server(server.url, timeout_s=120) as client:
                rng = random.Random(plan.seed)
                return await run_plan(client, plan, rng, lambda _, __: None, settle_s)

        results = asyncio.run(run())
        if self._options.tables:
            print_tables(results, self._console)
        return results

    def _try(self, what: str, part: Callable[[], None], log: Path | None = None) -> bool:
        """False if it failed; then why is printed, and what the server said last."""
        try:
            part()
            return True
        except Exception as error:
            self.say(f"FAILED {what}: {type(error).__name__}: {error}")
            if isinstance(error, subprocess.CalledProcessError):
                self.say(str(error.stderr)[-2000:])
            elif log is None or self._options.tables:
                self.say(traceback.format_exc(limit=-4))
            if log is not None and log.exists():
                tail = log.read_text(errors="replace").splitlines()[-self._options.log_lines :]
                self.say("\n".join(f"  | {line[:300]}" for line in tail))
            self.raw["parts"][f"failed: {what}"] = repr(error)
            self._save()
            return False

    def _add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.rows.append(row)
            self.say(" ".join(cells_of(row)))
        self._save()

    def _save(self) -> None:
        if self._options.json:
            rows = [asdict(row) | {"passed": row.passed} for row in self.rows]
            data = self.raw | {"rows": rows}
            file = self._options.json.with_stem(f"{self._options.json.stem}-{self.name}")
            file.write_text(json.dumps(data, indent=1) + "\n")

    def _directory(self) -> Path:
        if self._options.directory:
            return Path(self._options.directory)
        # Memory is faster than a disk, if the banks fit beside the files.
        memory, need = Path("/dev/shm"), 1.3 * bank_bytes(self.shape)
        has_room = memory.is_dir() and shutil.disk_usage(memory).free > need
        return memory if has_room else Path(tempfile.gettempdir())

    def say(self, text: str) -> None:
        seconds = time.monotonic() - self._started_s
        print(f"{seconds:6.1f} {text}", flush=True)


def _with_layers(shape: MoeShape, layers: int | None) -> MoeShape:
    return shape if layers is None else replace(shape, layers=layers)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(width=170)
    benches = []
    for name in options.shape:
        bench = Bench(name, options, console)
        benches.append(bench)
        bench.run()
    for bench in benches:
        print_rows(bench.rows, f"{bench.name}, {bench.shape.layers} layers", console)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", nargs="+", choices=list(SHAPES), default=["qwen3"])
    add("--layers", type=int, help="fewer, for a trial")
    add("--rates", nargs="*", type=float, default=list(RATES), help="shares of experts with slots")
    add("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=str(PARTS))
    add("--lengths", nargs="*", type=int, default=[8192, 32768], help="of fresh prompts")
    add("--extends", nargs="*", type=int, default=[1, 16, 64, 1024], help="of 2048 cached tokens")
    add("--streams", nargs="*", type=int, default=[1, 4, 8])
    add("--repeats", type=int, default=3, help="at most, of each measurement")
    add("--port", type=int, default=19190)
    add("--directory", help="for checkpoints; default: memory if there is enough, else /tmp")
    add("--keep", action="store_true", help="leave the checkpoints there; found ones are used")
    add("--serve-args", default="", metavar="OPTIONS", help="further ones of ft serve")
    add("--tables", action="store_true", help="bench_serve's tables too, and tracebacks")
    add("--log-lines", type=int, default=25, help="of the server, when a part fails")
    add("--json", type=Path, metavar="FILE", help="FILE-SHAPE gets everything, as it comes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
