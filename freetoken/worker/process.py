"""The worker process: start up, then execute the scheduler's plans one after another.

Main thread: load and steps. Heartbeats (link.py) and the watch over signals (stopping.py) run in
threads of their own. Ends with Shutdown, a signal, or an EngineError that names what went wrong.
"""

from __future__ import annotations

import gc
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import setproctitle
import torch

from freetoken import log
from freetoken.config import Config
from freetoken.errors import ConfigError, EngineError, FreeTokenError
from freetoken.model.compile import load_compiler
from freetoken.wire.messages import (
    FailureScope,
    Message,
    Phase,
    Refused,
    Shutdown,
    StepMode,
    StepPlan,
    StepResult,
    Welcome,
    WorkerFailed,
)
from freetoken.wire.sockets import Endpoints
from freetoken.worker.checkpoint import CheckpointSource
from freetoken.worker.device import find_device
from freetoken.worker.faults import StepError, describe
from freetoken.worker.keeper import find_keeper
from freetoken.worker.link import Lost, Progress, SchedulerLink
from freetoken.worker.pending import Pending
from freetoken.worker.source import ModelSource
from freetoken.worker.startup import Started, start
from freetoken.worker.stopping import Stop, stop_on_signals

NAME = "freetoken-worker"
MAX_LAUNCHED = 2
"""Steps on the device: one that runs and one behind it."""
ANSWER_MS = 250
"""Of a scheduler that is up; a worker that it refuses need not load a model to hear it."""
WAIT_S = 30e-6
"""Between two looks at the device and the socket while a step runs. Linux makes 0.1 ms of it: short
against a step, and the next one is queued behind it."""

_log = log.get(__name__)


def run(config: Config) -> int:
    """The process `ft worker`. Raises EngineError for what ends it otherwise than by request."""
    setproctitle.setproctitle(NAME)
    log.setup(NAME, config.log_level)
    try:
        with stop_on_signals():
            serve(config, open_source(config))
    except Stop:
        _log.info("stopped")
    return 0


def prepare(config: Config) -> None:
    """What a worker that stands by can do before it is wanted, without memory of the GPU's."""
    if config.compile == "auto" and config.device != "cpu" and torch.cuda.is_available():
        # Processes that compile: it will find what it needs in the cache.
        os.environ.setdefault("TORCH_WARM_POOL", "0")
        load_compiler()


def open_source(config: Config) -> ModelSource:
    """The checkpoint that the options name, nothing of it loaded yet."""
    if config.model is None:
        raise ConfigError("no model is given; name the directory of a checkpoint")
    keeper = None if config.run_dir is None else find_keeper(config.run_dir, os.environ)
    device = find_device(config.device)
    return CheckpointSource(
        Path(config.model),
        config.dtype,
        device,
        keeper,
        overlap_passes=not config.disable_moe_prefill_overlap,
    )


def serve(config: Config, source: ModelSource) -> None:
    """Load, announce, and execute plans until Shutdown."""
    if config.run_dir is None:
        raise ConfigError("--run-dir is not given: where does the scheduler listen?")
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    progress = Progress()
    link = SchedulerLink(Endpoints.in_directory(config.run_dir), progress)
    try:
        link.say_hello()
        link.hear_answer(ANSWER_MS)
        started = start(config, source, progress)
        gc.collect()
        gc.freeze()  # the libraries' million objects are not looked at again between steps
        progress.phase, progress.detail = Phase.READY, "serving"
        link.greet()
        _Loop(link, started).run()
    except FreeTokenError as error:
        link.say_failed(str(error))
        raise
    finally:
        gc.unfreeze()
        link.close()


class _Loop:
    """Receives, launches, answers. On a GPU the next plan is launched while a step runs, and each
    result leaves when the device has it; what a CPU computes is done when it is launched."""

    def __init__(self, link: SchedulerLink, started: Started) -> None:
        self._link = link
        self._runner = started.runner
        self._ready = started.ready
        self._launched: deque[Pending] = deque()
        self._num_stale = 0

    def run(self) -> None:
        self._announce()
        while True:
            message = self._next_message()
            if isinstance(message, StepPlan):
                self._step(message)
            elif isinstance(message, Shutdown):
                self._answer(0)
                _log.info(log.event("shutdown", reason=message.reason))
                return
            elif isinstance(message, Welcome):
                self._announce()
            elif isinstance(message, Lost):
                _log.warning(log.event("scheduler.lost", reason=message.reason))
                self._link.say_hello()
                self._link.greet()
                self._announce()
            elif isinstance(message, Refused):
                raise EngineError(f"the scheduler refused this worker: {message.reason}")
            elif message is not None:
                _log.warning(log.event("message.unexpected", kind=type(message).__name__))

    def _next_message(self) -> Message | Lost | None:
        """The next message, if one comes in time; results that fall due meanwhile are sent."""
        while self._launched:
            if self._is_due():
                self._answer_oldest()
                continue
            message = self._link.receive(0)
            if message is not None:
                return message
            time.sleep(WAIT_S)
        return self._link.receive()

    def _announce(self) -> None:
        """A new epoch: no row of the old one exists any more, and nobody waits for its results."""
        self._answer(0)
        self._runner.forget_all()
        self._link.send(msgspec.structs.replace(self._ready, epoch=self._link.epoch))
        _log.info(log.event("worker.ready", epoch=self._link.epoch))

    def _step(self, plan: StepPlan) -> None:
        if plan.epoch != self._link.epoch:
            self._num_stale += 1
            _log.info(log.event("plan.stale", epoch=plan.epoch, count=self._num_stale))
            return
        # A pass looks at what is resident before it starts, and waits for the device there.
        self._answer(0 if plan.mode is StepMode.PASS else MAX_LAUNCHED - 1)
        with _breaking(plan):
            self._launched.append(self._runner.launch(plan))

    def _answer(self, num_left: int) -> None:
        """Wait for the oldest steps and send their results until `num_left` are in flight."""
        while len(self._launched) > num_left:
            self._answer_oldest()

    def _is_due(self) -> bool:
        oldest = self._launched[0]
        with _breaking(oldest.plan):
            return oldest.is_done()

    def _answer_oldest(self) -> None:
        pending = self._launched.popleft()
        plan = pending.plan
        answer: StepResult | WorkerFailed
        try:
            with _breaking(plan):
                answer = pending.finish()
        except StepError as error:
            _log.warning(log.event("step.failed", step=plan.step_id, error=error))
            answer = WorkerFailed(FailureScope.STEP, plan.epoch, plan.step_id, str(error))
        if plan.epoch == self._link.epoch:
            self._link.send(answer)


@contextmanager
def _breaking(plan: StepPlan) -> Iterator[None]:
    """EngineError for whatever comes out of a step beside a StepError: after a fault of the device
    its context is lost, and no row can be trusted after any other."""
    try:
        yield
    except (StepError, EngineError):
        raise
    except Exception as error:
        _log.exception(log.event("step.broken", step=plan.step_id))
        raise EngineError(f"step {plan.step_id} broke: {describe(error)}") from error
