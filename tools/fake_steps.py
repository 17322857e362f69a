"""Answers to step plans without a model, and a worker process that gives them at a steady pace.

    python tools/fake_steps.py RUN_DIR --rows 256 --step-ms 2

A step ends `--step-ms` after the one before it, or after it arrived: so with two plans in flight,
as with a GPU, the way between the processes costs nothing unless it is longer than a step.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from freetoken.wire.beats import BeatClient
from freetoken.wire.messages import (
    PROTOCOL_VERSION,
    Beat,
    Hello,
    Phase,
    Role,
    Shutdown,
    StepPlan,
    StepResult,
    StepStats,
    Welcome,
    WorkerReady,
    pack_ids,
    unpack_ids,
)
from freetoken.wire.sockets import Dealer, Endpoints, connect_dealer

CONTEXT_TOKENS = 1 << 20
NUM_PAGES = 1 << 19
PAGE_SIZE = 16
VOCAB_SIZE = 256


def make_ready(max_rows: int, epoch: int = 1) -> WorkerReady:
    """A worker whose pages do not run out in a benchmark."""
    return WorkerReady(
        epoch=epoch,
        model="fake",
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_rows=max_rows,
        window=CONTEXT_TOKENS,
        context_tokens=CONTEXT_TOKENS,
        context_flag="",
        vocab_size=VOCAB_SIZE,
        num_layers=1,
        max_step_tokens=8192,
        max_pass_tokens=8192,
        max_on_demand_tokens=None,
        plan={},
    )


def sampled_rows(plan: StepPlan, num_layers: int) -> array[int]:
    """The rows that a step samples, in the order of its result: of a pass, only in its last
    part."""
    if plan.layers not in ((0, 0), (plan.layers[0], num_layers)):
        return array("i")
    rows = array("i", (extend.row_id for extend in plan.extends if extend.is_last))
    rows.extend(unpack_ids(plan.decode_rows))
    return rows


def answer(
    plan: StepPlan,
    draw: Callable[[Sequence[int]], array[int]],
    stats: StepStats,
    max_on_demand_tokens: int | None = None,
    num_layers: int = 1,
) -> StepResult:
    """The result of `plan`; `draw` gives a token for each of the rows it is told."""
    rows = sampled_rows(plan, num_layers)
    return StepResult(
        step_id=plan.step_id,
        epoch=plan.epoch,
        mode=plan.mode,
        row_ids=pack_ids(rows),
        token_ids=pack_ids(draw(rows)),
        logprobs=(),
        stats=stats,
        max_on_demand_tokens=max_on_demand_tokens,
    )


def draw_ones(rows: Sequence[int]) -> array[int]:
    return array("i", [1]) * len(rows)


def serve(run_dir: Path, max_rows: int, step_s: float) -> None:
    """Be a worker until told to end."""
    endpoints = Endpoints.in_directory(run_dir)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    name = f"worker-{os.getpid()}"
    beat = Beat(name, os.getpid(), 0, Phase.READY, "", 0, 0)
    beats = BeatClient(context, endpoints.beats, name, lambda: beat)
    socket = connect_dealer(context, endpoints.worker, name)
    dealer = Dealer(socket)
    beats.start()
    dealer.send(Hello(PROTOCOL_VERSION, Role.WORKER, name, os.getpid()))
    try:
        _run_steps(dealer, max_rows, step_s)
    finally:
        beats.stop()
        socket.close(200)
        context.term()


def _run_steps(dealer: Dealer, max_rows: int, step_s: float) -> None:
    steps: deque[tuple[StepPlan, float]] = deque()  # and when each ends
    end_s = 0.0
    while True:
        left_ms = 1000.0 if not steps else 1e3 * (steps[0][1] - time.monotonic())
        message = dealer.receive(max(0, int(left_ms)))
        match message:
            case Shutdown():
                return
            case Welcome():
                dealer.send(make_ready(max_rows, message.epoch))
            case StepPlan():
                end_s = max(end_s, time.monotonic()) + step_s
                steps.append((message, end_s))
        if steps and (left_s := steps[0][1] - time.monotonic()) < 1e-3:
            time.sleep(max(0.0, left_s))
            plan, _ = steps.popleft()
            dealer.send(answer(plan, draw_ones, StepStats(step_us=int(step_s * 1e6))))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=2.0)
    args = parser.parse_args(arguments)
    serve(args.run_dir, args.rows, args.step_ms / 1e3)
    return 0


if __name__ == "__main__":
    sys.exit(main())
