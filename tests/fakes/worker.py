"""A stand-in for the worker process: real sockets and heartbeats, the fake model behind them.

    python -m tests.fakes.worker --run-dir DIR [--step-ms N] [--reply 72,105] …

Faults are scripted by step number (counted from 1 over its life; the readiness probe is a step).
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import zmq

from freetoken.wire.beats import BeatClient
from freetoken.wire.messages import (
    PROTOCOL_VERSION,
    Beat,
    FailureScope,
    Hello,
    Phase,
    Refused,
    Role,
    Shutdown,
    StepMode,
    StepPlan,
    StepResult,
    Welcome,
    WorkerFailed,
    WorkerReady,
)
from freetoken.wire.sockets import Dealer, Endpoints, connect_dealer
from tests.fakes.model import FakeModel


@dataclass(frozen=True)
class WorkerScript:
    """What the stand-in pretends to be, and which of its steps go wrong how."""

    num_pages: int = 64
    page_size: int = 16
    max_rows: int = 8
    context_tokens: int | None = None  # default: the whole pool
    context_flag: str = "--context-tokens"
    window: int | None = None  # default: wide enough
    vocab_size: int = 256
    max_step_tokens: int = 64
    max_pass_tokens: int = 256
    max_on_demand_tokens: int | None = None
    reply: tuple[int, ...] | None = None
    num_layers: int = 1
    step_ms: float = 0.0  # a step, and
    token_ms: float = 0.0  # more for each token that it extends on demand
    layer_ms: float = 0.0  # a layer of a pass; 0: a part is like any step
    load_s: float = 0.0
    fail_steps: tuple[int, ...] = ()  # answered with WorkerFailed(step)
    garbage_steps: tuple[int, ...] = ()  # a malformed frame goes before the result
    wrong_steps: tuple[int, ...] = ()  # the result names other rows
    lost_steps: tuple[int, ...] = ()  # a malformed frame comes instead of the result
    stall_step: int | None = None  # never ends, until released
    die_step: int | None = None  # WorkerFailed(process), then exit
    kill_step: int | None = None  # exit without a word


class FakeWorker:
    """Runs in a thread (`start`) or as a process (`run`)."""

    def __init__(self, run_dir: Path, script: WorkerScript | None = None) -> None:
        self.script = script or WorkerScript()
        self.released = threading.Event()  # lets a stalled step go on
        self.num_steps = 0
        self.epochs: list[int] = []
        self.refused: str | None = None
        self.shutdown: str | None = None
        self._endpoints = Endpoints.in_directory(run_dir)
        self._stopping = threading.Event()
        self._name = f"worker-{os.getpid()}-{secrets.token_hex(3)}"
        self._beat = Beat(self._name, os.getpid(), 0, Phase.LOADING, "reading weights", 0, 100)
        self._thread = threading.Thread(target=self.run, name=self._name)

    def start(self) -> FakeWorker:
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        self.released.set()
        self._thread.join()

    def run(self) -> int:
        """Until shut down, stopped, refused or dead by script; the exit code."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        beats = BeatClient(context, self._endpoints.beats, self._name, lambda: self._beat)
        self._socket = connect_dealer(context, self._endpoints.worker, self._name)
        self._dealer = Dealer(self._socket)
        beats.start()
        try:
            return self._serve(beats)
        finally:
            beats.stop()
            self._socket.close(200)
            context.term()

    def _serve(self, beats: BeatClient) -> int:
        while not self._stopping.is_set():
            self._model = make_model(self.script)
            self._dealer.send(Hello(PROTOCOL_VERSION, Role.WORKER, self._name, os.getpid()))
            code = self._live(beats)
            if code is not None:
                return code
        return 0

    def _live(self, beats: BeatClient) -> int | None:
        """One life: from Welcome to the end, or to a new scheduler (None)."""
        epoch = None
        scheduler = None
        while not self._stopping.is_set():
            heard = beats.last
            if heard is not None and epoch is not None:
                scheduler = scheduler or heard.beat.epoch
                if heard.beat.epoch != scheduler:
                    return None
            message = self._dealer.receive(20)
            match message:
                case None:
                    continue
                case Welcome():
                    epoch = message.epoch
                    self.epochs.append(epoch)
                    self._load()
                    self._dealer.send(self._ready(epoch))
                case Refused():
                    self.refused = message.reason
                    return 1
                case Shutdown():
                    self.shutdown = message.reason
                    return 0
                case StepPlan() if message.epoch == epoch:
                    code = self._step(message)
                    if code is not None:
                        return code
                case _:
                    continue
        return 0

    def _load(self) -> None:
        end_s = time.monotonic() + self.script.load_s
        while (left_s := end_s - time.monotonic()) > 0 and not self._stopping.is_set():
            done = int(100 * (1 - left_s / self.script.load_s))
            self._beat = msgspec.structs.replace(self._beat, done=done)
            self._stopping.wait(0.02)
        self._beat = msgspec.structs.replace(self._beat, phase=Phase.READY, detail="", done=100)

    def _step(self, plan: StepPlan) -> int | None:
        self.num_steps += 1
        script, number = self.script, self.num_steps
        if number == script.kill_step:
            return 9
        if number == script.die_step:
            self._fail(FailureScope.PROCESS, plan, "the fake device is gone")
            return 1
        if number == script.stall_step:
            self.released.wait()
        took_ms = duration_ms(script, plan)
        if took_ms:
            self._stopping.wait(took_ms / 1e3)
        if number in script.fail_steps:
            self._model.fail(plan)
            self._fail(FailureScope.STEP, plan, "out of fake memory")
            return None
        result = self._model.run(plan)
        if number in script.garbage_steps:
            self._socket.send(b"\xc1 no message")
            self._socket.send_multipart([b"two", b"frames"])
        if number in script.lost_steps:
            self._socket.send(b"\xc1 no message")
            return None
        if number in script.wrong_steps:
            result = msgspec.structs.replace(result, row_ids=result.row_ids + b"\0\0\0\0")
        self._dealer.send(finish(script, plan, result))
        return None

    def _fail(self, scope: FailureScope, plan: StepPlan, message: str) -> None:
        step_id = plan.step_id if scope is FailureScope.STEP else None
        self._dealer.send(WorkerFailed(scope, plan.epoch, step_id, message))

    def _ready(self, epoch: int) -> WorkerReady:
        return make_ready(self.script, epoch)


def make_model(script: WorkerScript) -> FakeModel:
    s = script
    size = (s.num_pages, s.page_size, s.max_rows, s.vocab_size)
    return FakeModel(*size, s.reply, num_layers=s.num_layers)


def duration_ms(script: WorkerScript, plan: StepPlan) -> float:
    """What such a worker takes for a step."""
    if plan.mode is StepMode.PASS and script.layer_ms:
        return (plan.layers[1] - plan.layers[0]) * script.layer_ms
    num_tokens = sum(len(extend.token_ids) // 4 for extend in plan.extends)
    return script.step_ms + num_tokens * script.token_ms


def finish(script: WorkerScript, plan: StepPlan, result: StepResult) -> StepResult:
    """The model's result as such a worker sends it."""
    took_us = round(1e3 * duration_ms(script, plan)) or result.stats.step_us
    return msgspec.structs.replace(
        result,
        stats=msgspec.structs.replace(result.stats, step_us=took_us),
        max_on_demand_tokens=script.max_on_demand_tokens,
    )


def make_ready(script: WorkerScript, epoch: int = 1) -> WorkerReady:
    """The WorkerReady of such a worker."""
    context = script.context_tokens or script.num_pages * script.page_size
    return WorkerReady(
        epoch=epoch,
        model="fake",
        num_pages=script.num_pages,
        page_size=script.page_size,
        max_rows=script.max_rows,
        window=script.window or max(context, 1 << 17),
        context_tokens=context,
        context_flag=script.context_flag,
        vocab_size=script.vocab_size,
        num_layers=script.num_layers,
        max_step_tokens=script.max_step_tokens,
        max_pass_tokens=script.max_pass_tokens,
        max_on_demand_tokens=script.max_on_demand_tokens,
        plan={},
    )


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def _parse(arguments: list[str]) -> tuple[Path, WorkerScript]:
    parser = argparse.ArgumentParser(prog="tests.fakes.worker", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    for name in ("num_pages", "page_size", "max_rows", "context_tokens", "window", "vocab_size"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    for name in ("max_step_tokens", "max_pass_tokens", "max_on_demand_tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    for name in ("stall_step", "die_step", "kill_step"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--num-layers", type=int)
    for name in ("step_ms", "token_ms", "layer_ms", "load_s"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float)
    for name in ("reply", "fail_steps", "garbage_steps", "wrong_steps"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=_ints, help="a,b,c")
    given = {k: v for k, v in vars(parser.parse_args(arguments)).items() if v is not None}
    return given.pop("run_dir"), replace(WorkerScript(), **given)


if __name__ == "__main__":
    sys.exit(FakeWorker(*_parse(sys.argv[1:])).run())
