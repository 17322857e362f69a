"""The worker process: start up, then execute the scheduler's plans one after another.

Main thread: load and steps. Heartbeats (link.py) and the watch over signals (stopping.py) run in
threads of their own. Ends with Shutdown, a signal, or an EngineError that names what went wrong.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import msgspec
import setproctitle
import torch

from freetoken import log
from freetoken.config import Config
from freetoken.errors import ConfigError, EngineError, FreeTokenError
from freetoken.wire.messages import (
    FailureScope,
    Phase,
    Refused,
    Shutdown,
    StepPlan,
    Welcome,
    WorkerFailed,
)
from freetoken.wire.sockets import Endpoints
from freetoken.worker.budget import measure_budget
from freetoken.worker.checkpoint import CheckpointSource
from freetoken.worker.faults import StepError
from freetoken.worker.keeper import find_keeper
from freetoken.worker.link import Lost, Progress, SchedulerLink
from freetoken.worker.startup import ModelSource, Started, start
from freetoken.worker.stopping import Stop, stop_on_signals

NAME = "freetoken-worker"

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


def open_source(config: Config) -> ModelSource:
    """The checkpoint that the options name, nothing of it loaded yet."""
    if config.device == "cuda":
        raise ConfigError(
            "--device cuda: this version computes on the CPU only; use --device cpu or auto"
        )
    if config.model is None:
        raise ConfigError("no model is given; name the directory of a checkpoint")
    keeper = None if config.run_dir is None else find_keeper(config.run_dir, os.environ)
    return CheckpointSource(Path(config.model), config.dtype, torch.device("cpu"), keeper)


def serve(config: Config, source: ModelSource) -> None:
    """Load, announce, and execute plans until Shutdown."""
    if config.run_dir is None:
        raise ConfigError("--run-dir is not given: where does the scheduler listen?")
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    progress = Progress()
    link = SchedulerLink(Endpoints.in_directory(config.run_dir), progress)
    try:
        link.say_hello()
        started = start(config, source, progress, measure_budget())
        gc.collect()
        gc.freeze()  # the libraries' million objects are not looked at again between steps
        progress.phase, progress.detail = Phase.READY, "serving"
        link.greet()
        _Loop(link, started).run()
    except FreeTokenError as error:
        link.say_failed(str(error))
        raise
    finally:
        link.close()


class _Loop:
    """Receives, executes, answers. Up to two plans are queued; the next is taken at once."""

    def __init__(self, link: SchedulerLink, started: Started) -> None:
        self._link = link
        self._runner = started.runner
        self._ready = started.ready
        self._num_stale = 0

    def run(self) -> None:
        self._announce()
        while True:
            message = self._link.receive()
            if isinstance(message, StepPlan):
                self._step(message)
            elif isinstance(message, Shutdown):
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

    def _announce(self) -> None:
        """A new epoch: no row of the old one exists any more."""
        self._runner.forget_all()
        self._link.send(msgspec.structs.replace(self._ready, epoch=self._link.epoch))
        _log.info(log.event("worker.ready", epoch=self._link.epoch))

    def _step(self, plan: StepPlan) -> None:
        if plan.epoch != self._link.epoch:
            self._num_stale += 1
            _log.info(log.event("plan.stale", epoch=plan.epoch, count=self._num_stale))
            return
        try:
            result = self._runner.execute(plan)
        except StepError as error:
            _log.warning(log.event("step.failed", step=plan.step_id, error=error))
            failed = WorkerFailed(FailureScope.STEP, plan.epoch, plan.step_id, str(error))
            self._link.send(failed)
        except Exception as error:
            _log.exception(log.event("step.broken", step=plan.step_id))
            reason = " ".join(str(error).split())
            raise EngineError(
                f"step {plan.step_id} broke: {type(error).__name__}: {reason}"
            ) from error
        else:
            self._link.send(result)
