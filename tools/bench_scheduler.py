#!/usr/bin/env python3
"""What waiting requests cost those that run, and what the scheduler needs for a step.

    python tools/bench_scheduler.py
    python tools/bench_scheduler.py --profile

First the real scheduler process between a client and a worker that takes 2 ms a step (sockets,
three processes): decode throughput with 0, 64 and 10,000 requests waiting, in turns. Then the same
classes in this process: CPU time from a result's frame to the next plan's, and of the messages to
the apis, which go out behind it. "requests" waiting ask for rows, "followers" for the prefix that a
long prompt is computing.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import logging
import os
import pstats
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from itertools import count, pairwise
from pathlib import Path
from statistics import mean, median

from fake_steps import answer, draw_ones, make_ready
from scheduler_client import LIMITS, Client, processes

from freetoken import log
from freetoken.scheduler.scheduler import Scheduler
from freetoken.wire.codec import decode, encode
from freetoken.wire.messages import (
    Accepted,
    Sampling,
    StepPlan,
    StepResult,
    StepStats,
    Submit,
    Tokens,
    pack_ids,
)

PROMPT_TOKENS = 100
SETTLE_S = 0.3
WARM_UP_STEPS = 64
STAGES = ("decode", "apply", "plan", "encode", "tokens")
CRITICAL = STAGES[:4]
"""What stands between a result and the next plan."""


def make_submit(number: int, seed: int, max_tokens: int | None = None) -> Submit:
    """Prompts of different lengths that share nothing, so that rows change pages in turn."""
    prompt = [number >> 8 & 255, number & 255, *([seed & 255] * (PROMPT_TOKENS + number % 16))]
    return Submit(f"cmpl-{seed:08x}-{number:08d}", pack_ids(prompt), max_tokens, Sampling(seed=1))


# ---------------------------------------------------------------- three processes


def cpu_s(pid: int) -> float:
    """CPU time of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_throughput(
    rows: int, step_ms: float, queues: Sequence[int], rounds: int, duration_s: float
) -> dict[int, list[tuple[float, float]]]:
    """By number of waiting requests, for each round: tokens per second, and the scheduler's CPU
    time for a step in µs."""
    figures: dict[int, list[tuple[float, float]]] = {waiting: [] for waiting in queues}
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory)
        run_dir.chmod(0o700)
        with processes(run_dir, rows, step_ms) as pid:
            client = Client(run_dir)
            client.wait_ready()
            client.submit([make_submit(number, 1) for number in range(rows)])
            client.wait(rows, 0)
            for number in range(rounds):
                for at in range(len(queues)):
                    waiting = queues[(at + number) % len(queues)]  # each comes first in its turn
                    asked = [make_submit(i, 2 + number) for i in range(waiting)]
                    client.submit(asked)
                    client.wait(rows, waiting)
                    client.read(SETTLE_S)
                    figures[waiting].append(_measure(client, pid, rows, duration_s))
                    client.abort(asked)
                    client.wait(rows, 0)
            client.close()
    return figures


def _measure(client: Client, pid: int, rows: int, duration_s: float) -> tuple[float, float]:
    tokens, used_s, start_s = client.num_tokens, cpu_s(pid), time.monotonic()
    client.read(duration_s)
    tokens = client.num_tokens - tokens
    used_s = cpu_s(pid) - used_s
    return tokens / (time.monotonic() - start_s), used_s / max(1, tokens / rows) * 1e6


# ---------------------------------------------------------------- one process


class Loop:
    """The scheduler with `rows` running and two steps in flight, answered at once."""

    def __init__(
        self, rows: int, waiting: int, *, follow: bool = False, turnover: bool = False
    ) -> None:
        seeds = count(1)
        self.scheduler = Scheduler(*LIMITS, lambda: next(seeds))
        self.scheduler.attach(make_ready(rows + 2 * follow))
        self._frames: deque[bytes] = deque()
        self._now_s = 0.0
        for number in range(rows):
            self._submit(make_submit(number, 1, 60 + number % 80 if turnover else None))
        while self.scheduler.num_running < rows or len(self._frames) < 2:
            self.step()
        if follow:
            self._submit_followers(waiting)
        else:
            for number in range(waiting):
                self._submit(make_submit(number, 2, 60 + number % 80 if turnover else None))

    def _submit(self, submit: Submit) -> None:
        assert isinstance(self.scheduler.submit(b"api", submit, self._now_s), Accepted)

    def _submit_followers(self, waiting: int) -> None:
        """A prompt that takes a step for each 8,192 tokens, and others that begin as it does."""
        tokens = [3] * (8192 * 100)
        self._submit(Submit("leader", pack_ids(tokens), 1, Sampling(seed=1)))
        shared = pack_ids(tokens[:20000])
        for number in range(waiting):
            ids = shared + pack_ids([number >> 8 & 255, number & 255])
            self._submit(Submit(f"follower-{number}", ids, 1, Sampling(seed=1)))

    def step(self) -> list[int]:
        """One turn: nanoseconds of CPU time by stage."""
        clock = time.thread_time_ns
        self._now_s += 0.002
        stamps = [clock()]
        outputs = None
        if len(self._frames) == 2:
            result = decode(self._frames.popleft())
            stamps.append(clock())
            assert isinstance(result, StepResult)
            outputs = self.scheduler.apply(result, self._now_s)
            stamps.append(clock())
        plan = self.scheduler.plan(self._now_s)
        stamps.append(clock())
        assert plan is not None
        frame = encode(plan)
        stamps.append(clock())
        if outputs is not None:
            for deltas in outputs.deltas.values():
                encode(Tokens(tuple(deltas), outputs.step_us))
            stamps.append(clock())
        self.scheduler.journal.write()
        read = decode(frame)
        assert isinstance(read, StepPlan)
        self._frames.append(encode(answer(read, draw_ones, StepStats(step_us=2000))))
        return [later - earlier for earlier, later in pairwise(stamps)]


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """As in the process, where it runs when no step is out (scheduler/collector.py)."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def setup_log() -> None:
    """Lines are noted and made as in the process, and go nowhere."""
    log.setup("bench", "INFO")
    [handler] = logging.getLogger("freetoken").handlers
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(StringIO())


def measure_steps(loop: Loop, num_steps: int, skip: int = WARM_UP_STEPS) -> dict[str, float]:
    """Means by stage, and mean, median and largest time from result to plan; µs of CPU time."""
    for _ in range(skip):
        loop.step()
    with collector_at_rest():
        steps = [loop.step() for _ in range(num_steps)]
    figures = {stage: mean(step[i] for step in steps) / 1e3 for i, stage in enumerate(STAGES)}
    critical = [sum(step[: len(CRITICAL)]) / 1e3 for step in steps]
    return figures | {"mean": mean(critical), "median": median(critical), "max": max(critical)}


# ---------------------------------------------------------------- report


def print_throughput(figures: dict[int, list[tuple[float, float]]], rows: int) -> None:
    base = median(rate for rate, _ in figures[min(figures)])
    print(
        f"\n{rows} rows decode, tokens/s (median, smallest to largest), the scheduler's CPU time:"
    )
    for waiting, rounds in figures.items():
        rates = [rate for rate, _ in rounds]
        print(
            f"{waiting:8,} waiting {median(rates):10,.0f}  ({min(rates):,.0f} to {max(rates):,.0f})"
            f"  {median(rates) / base - 1:+.2%}  {median(us for _, us in rounds):.0f} µs a step"
        )


def print_steps(name: str, figures: dict[str, float]) -> None:
    stages = "  ".join(f"{stage} {figures[stage]:.0f}" for stage in STAGES)
    total = "  ".join(f"{key} {figures[key]:.0f}" for key in ("mean", "median", "max"))
    print(f"{name:>18}  {stages}  | result to plan: {total}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=256, help="that decode [256]")
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 64, 10_000])
    parser.add_argument("--rounds", type=int, default=9, help="of throughput; 0: none [9]")
    parser.add_argument("--round-s", type=float, default=1.0, help="each measurement [1]")
    parser.add_argument("--step-ms", type=float, default=2.0, help="the worker's step [2]")
    parser.add_argument("--steps", type=int, default=1000, help="timed in this process [1000]")
    parser.add_argument("--profile", action="store_true", help="list the functions of those steps")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args(arguments)
    setup_log()
    report: dict[str, object] = {}
    print(f"CPU time in µs, {args.rows} rows, mean of {args.steps} steps:")
    for waiting in args.waiting:
        figures = measure_steps(Loop(args.rows, waiting), args.steps)
        print_steps(f"{waiting:,} requests", figures)
        report[f"steps_{waiting}"] = figures
    most = max(args.waiting)
    if most:
        figures = measure_steps(Loop(args.rows, most, follow=True), 95, 0)
        print_steps(f"{most:,} followers", figures)
        report[f"followers_{most}"] = figures
        figures = measure_steps(Loop(args.rows, most, turnover=True), min(args.steps, most // 4))
        print_steps(f"{most:,} turnover", figures)
        report[f"turnover_{most}"] = figures
    if args.profile:
        print_profile(Loop(args.rows, most), args.steps)
    if args.rounds:
        rates = measure_throughput(args.rows, args.step_ms, args.waiting, args.rounds, args.round_s)
        print_throughput(rates, args.rows)
        report["throughput"] = {str(waiting): rounds for waiting, rounds in rates.items()}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))
    return 0


def print_profile(loop: Loop, num_steps: int) -> None:
    with cProfile.Profile() as profile:
        for _ in range(num_steps):
            loop.step()
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    sys.exit(main())
