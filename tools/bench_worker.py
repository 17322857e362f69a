#!/usr/bin/env python3
"""Time the worker's steps in this process, without the api and the scheduler, and list the kernels.

    python tools/bench_worker.py MODEL --rate 0.5 --streams 1 4 8
    python tools/bench_worker.py MODEL --passes 8192 32768 --profile

Decode steps go two in flight, as in the server. Beside each figure: distinct experts, misses, bytes
over the link, and what those bytes take at the measured gather speed. `--profile` adds the time of
each kernel in one decode step per number of streams and in one pass.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from freetoken import log
from freetoken.config import Config
from freetoken.wire.messages import (
    Extend,
    PageRun,
    RowStart,
    Sampling,
    StepMode,
    StepPlan,
    StepResult,
    pack_ids,
)
from freetoken.worker.budget import measure_budget
from freetoken.worker.checkpoint import CheckpointSource
from freetoken.worker.link import Progress
from freetoken.worker.runner import Runner
from freetoken.worker.startup import start

KERNELS_SHOWN = 30
PROMPT_TOKENS = 64


class Rows:
    """Rows of a runner with pages of their own, extended and decoded by hand."""

    def __init__(self, runner: Runner, seed: int) -> None:
        self._runner = runner
        self._generator = torch.Generator().manual_seed(seed)
        self._lengths: dict[int, int] = {}
        self._num_steps = 0

    def random_ids(self, num_tokens: int) -> list[int]:
        size = self._runner.limits.vocab_size
        return torch.randint(0, size, (num_tokens,), generator=self._generator).tolist()

    def start(self, row: int, room_tokens: int, temperature: float) -> tuple[RowStart, PageRun]:
        """A row with pages for `room_tokens`, beside those of smaller rows."""
        size = self._runner.limits.page_size
        pages = -(-room_tokens // size)
        self._lengths[row] = 0
        return (
            RowStart(row, Sampling(temperature=temperature, seed=row), 0, b"", b""),
            PageRun(row, 0, pack_ids(range(row * pages, (row + 1) * pages))),
        )

    def extend(
        self, row: int, num_tokens: int, mode: StepMode, start: tuple[RowStart, PageRun] | None
    ) -> StepPlan:
        cached = self._lengths[row]
        self._lengths[row] += num_tokens
        extend = Extend(row, cached, pack_ids(self.random_ids(num_tokens)), True)
        starts, runs = ((start[0],), (start[1],)) if start else ((), ())
        return self._plan(mode, starts=starts, page_runs=runs, extends=(extend,))

    def decode(self, rows: Sequence[int]) -> StepPlan:
        positions = [self._lengths[row] for row in rows]
        for row in rows:
            self._lengths[row] += 1
        return self._plan(
            StepMode.ON_DEMAND,
            decode_rows=pack_ids(rows),
            decode_positions=pack_ids(positions),
        )

    def _plan(self, mode: StepMode, **parts: object) -> StepPlan:
        self._num_steps += 1
        fields: dict[str, object] = {
            "forget_rows": b"",
            "page_copies": (),
            "starts": (),
            "page_runs": (),
            "extends": (),
            "decode_rows": b"",
            "decode_positions": b"",
        }
        return StepPlan(self._num_steps, 0, mode, **(fields | parts))  # type: ignore[arg-type]


def run_two_in_flight(
    runner: Runner, plans: Iterator[StepPlan]
) -> tuple[list[float], list[StepResult]]:
    """Milliseconds between results, and the results."""
    pending, results, ends = deque[object](), [], []
    for plan in plans:
        pending.append(runner.launch(plan))
        if len(pending) == 2:
            results.append(pending.popleft().finish())  # type: ignore[attr-defined]
            ends.append(time.perf_counter())
    while pending:
        results.append(pending.popleft().finish())  # type: ignore[attr-defined]
        ends.append(time.perf_counter())
    return [(b - a) * 1e3 for a, b in pairwise(ends)], results


def bench_decode(runner: Runner, options: argparse.Namespace, streams: int, gather: float) -> None:
    runner.forget_all()
    rows = Rows(runner, options.seed)
    room = PROMPT_TOKENS + options.steps + 64
    for row in range(streams):
        plan = rows.extend(
            row, PROMPT_TOKENS, StepMode.ON_DEMAND, rows.start(row, room, options.temperature)
        )
        runner.execute(plan)
    gaps, results = run_two_in_flight(
        runner, (rows.decode(range(streams)) for _ in range(options.steps))
    )
    half = len(gaps) // 2
    report(f"decode, {streams} streams", gaps[half:], results[half + 1 :], gather)
    if options.profile:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run_two_in_flight(runner, (rows.decode(range(streams)) for _ in range(4)))
            torch.cuda.synchronize()
        print_kernels(profiler, 4)


def bench_passes(runner: Runner, options: argparse.Namespace, length: int, gather: float) -> None:
    times, results = [], []
    for turn in range(3):
        runner.forget_all()
        rows = Rows(runner, options.seed + turn)
        plan = rows.extend(0, length, StepMode.PASS, rows.start(0, length + 16, 0.0))
        started_s = time.perf_counter()
        results.append(runner.execute(plan))
        times.append((time.perf_counter() - started_s) * 1e3)
    report(f"pass, {length} tokens", times, results, gather)
    if options.profile:
        runner.forget_all()
        rows = Rows(runner, options.seed)
        plan = rows.extend(0, length, StepMode.PASS, rows.start(0, length + 16, 0.0))
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            runner.execute(plan)
            torch.cuda.synchronize()
        print_kernels(profiler, 1)


def bench_extends(runner: Runner, options: argparse.Namespace, length: int, gather: float) -> None:
    times, results = [], []
    runner.forget_all()
    rows = Rows(runner, options.seed)
    room = 2048 + 8 * length
    runner.execute(rows.extend(0, 2048, StepMode.PASS, rows.start(0, room, 0.0)))
    for _ in range(8):
        plan = rows.extend(0, length, StepMode.ON_DEMAND, None)
        started_s = time.perf_counter()
        results.append(runner.execute(plan))
        times.append((time.perf_counter() - started_s) * 1e3)
    report(f"extend, {length} tokens on demand", times[3:], results[3:], gather)


def report(what: str, times: Sequence[float], results: Sequence[StepResult], gather: float) -> None:
    stats = [result.stats for result in results]
    num_bytes = sum(s.expert_bytes for s in stats) / len(stats)
    misses = sum(s.slot_misses for s in stats) / len(stats)
    hits = sum(s.slot_hits for s in stats) / len(stats)
    distinct = sum(s.distinct_experts for s in stats) / len(stats)
    print(
        f"{what:28} {median(times):8.3f} ms  (p90 {sorted(times)[int(len(times) * 0.9)]:.3f})  "
        f"distinct {distinct:7.1f}  hits {hits:7.1f}  misses {misses:7.1f}  "
        f"{num_bytes / 1e6:9.1f} MB = {num_bytes / gather * 1e3:7.2f} ms of gathering",
        flush=True,
    )


def print_kernels(profiler: profile, num_steps: int) -> None:
    events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events)
    print(f"  all kernels {total / num_steps:.0f} µs a step")
    for event in events[:KERNELS_SHOWN]:
        time_us = event.self_device_time_total / num_steps
        print(f"  {time_us:8.1f} µs {event.count / num_steps:6.1f} × {event.key[:90]}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--rate", type=float, default=0.5, help="slots as a share of all experts")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--passes", type=int, nargs="*", default=[], metavar="TOKENS")
    parser.add_argument("--extends", type=int, nargs="*", default=[], metavar="TOKENS")
    parser.add_argument(
        "--steps", type=int, default=200, help="decode steps; the second half counts"
    )
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--profile", action="store_true", help="list kernels")
    parser.add_argument("--gather", type=float, default=51.0, help="GB/s, for the comparison")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    log.setup("bench_worker", "WARNING")
    config = Config(model=str(options.model), device="cuda", moe_cache_rate=options.rate)
    source = CheckpointSource(options.model, "auto", torch.device("cuda"))
    started_s = time.perf_counter()
    runner = start(config, source, Progress(), measure_budget()).runner
    print(f"ready after {time.perf_counter() - started_s:.1f} s", flush=True)
    gather = options.gather * 1e9
    for streams in options.streams:
        bench_decode(runner, options, streams, gather)
    for length in options.extends:
        bench_extends(runner, options, length, gather)
    for length in options.passes:
        bench_passes(runner, options, length, gather)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
