"""The worker's loop while a device computes: what is launched when, and when results leave."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest

from freetoken.config import Config
from freetoken.errors import EngineError
from freetoken.wire.messages import (
    FailureScope,
    Shutdown,
    StepMode,
    StepResult,
    StepStats,
    WorkerFailed,
    WorkerReady,
)
from freetoken.worker import process
from freetoken.worker.faults import StepError
from freetoken.worker.startup import Started
from tests.worker.plans import make_plan
from tests.worker.scripted import ScriptedScheduler

READY = WorkerReady(
    epoch=0,
    model="slow",
    num_pages=8,
    page_size=4,
    max_rows=4,
    window=32,
    context_tokens=32,
    context_flag="",
    vocab_size=10,
    num_layers=2,
    max_step_tokens=8,
    max_pass_tokens=8,
    max_on_demand_tokens=None,
    plan={},
)


@dataclass
class SlowStep:
    """Runs until it is told that it is done, or what becomes of it."""

    plan: object
    runner: SlowRunner
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def is_done(self):
        if isinstance(self.error, RuntimeError):
            raise self.error
        return self.done.is_set()

    def finish(self):
        self.runner.log(f"finish {self.plan.step_id}")
        assert self.done.wait(20)
        if self.error is not None:
            raise self.error
        return StepResult(
            self.plan.step_id, self.plan.epoch, self.plan.mode, b"", b"", (), StepStats(), None
        )


class SlowRunner:
    """`steps`: those launched, in order."""

    def __init__(self):
        self.steps = []
        self.events = []
        self._changed = threading.Condition()

    def launch(self, plan):
        step = SlowStep(plan, self)
        with self._changed:
            self.steps.append(step)
            self._changed.notify_all()
        self.log(f"launch {plan.step_id}")
        return step

    def log(self, event):
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait_for(self, event):
        """Until it has happened."""
        with self._changed:
            assert self._changed.wait_for(lambda: event in self.events, 20), self.events

    def forget_all(self):
        self.log("forget")


class Worker:
    """The loop in a thread, over a runner that a test drives."""

    def __init__(self, run_dir, monkeypatch):
        self.runner = SlowRunner()
        monkeypatch.setattr(process, "start", lambda *_: Started(self.runner, READY))
        self.error = None
        self._config = Config(model="slow", run_dir=run_dir, threads=1)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            process.serve(self._config, None)
        except EngineError as error:
            self.error = error

    def join(self):
        self._thread.join(20)
        assert not self._thread.is_alive()

    def step(self, step_id):
        self.runner.wait_for(f"launch {step_id}")
        return next(step for step in self.runner.steps if step.plan.step_id == step_id)


@pytest.fixture
def scheduler(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("w")
    scheduler = ScriptedScheduler(run_dir)
    scheduler.run_dir = run_dir
    yield scheduler
    scheduler.close()


@pytest.fixture
def worker(scheduler, monkeypatch):
    worker = Worker(scheduler.run_dir, monkeypatch)
    scheduler.welcome()
    yield worker
    for step in worker.runner.steps:
        step.done.set()
    if worker.error is None:
        scheduler.send(Shutdown("the test is over"))
    worker.join()


def plan(step_id, **changes):
    return make_plan(step_id=step_id, **changes)


def test_the_next_plan_is_launched_while_a_step_runs(scheduler, worker):
    scheduler.send(plan(1))
    first = worker.step(1)
    scheduler.send(plan(2))
    second = worker.step(2)
    assert "finish 1" not in worker.runner.events
    first.done.set()
    assert scheduler.expect(StepResult).step_id == 1
    assert "finish 2" not in worker.runner.events, "nobody waits for it"
    scheduler.send(plan(3))
    worker.step(3)
    second.done.set()
    assert scheduler.expect(StepResult).step_id == 2


def test_a_third_plan_waits_until_one_of_two_is_answered(scheduler, worker):
    for step_id in (1, 2, 3):
        scheduler.send(plan(step_id))
    worker.runner.wait_for("finish 1")
    assert "launch 3" not in worker.runner.events
    worker.step(1).done.set()
    worker.step(3)
    assert scheduler.expect(StepResult).step_id == 1


def test_a_pass_is_launched_when_the_device_has_nothing_else(scheduler, worker):
    scheduler.send(plan(1))
    scheduler.send(plan(2, mode=StepMode.PASS))
    worker.runner.wait_for("finish 1")
    assert "launch 2" not in worker.runner.events
    worker.step(1).done.set()
    worker.step(2).done.set()
    assert [scheduler.expect(StepResult).step_id for _ in "12"] == [1, 2]


def test_a_step_that_fails_is_answered_in_its_turn(scheduler, worker):
    scheduler.send(plan(1))
    scheduler.send(plan(2))
    second, first = worker.step(2), worker.step(1)
    first.error = StepError("rows [0] leave nothing")
    second.done.set()
    first.done.set()
    failed = scheduler.expect(WorkerFailed)
    assert (failed.scope, failed.step_id) == (FailureScope.STEP, 1)
    assert scheduler.expect(StepResult).step_id == 2


def test_shutdown_waits_for_what_is_launched(scheduler, worker):
    scheduler.send(plan(1))
    scheduler.send(plan(2))
    scheduler.send(Shutdown("enough"))
    worker.step(1).done.set()
    worker.step(2).done.set()
    assert [scheduler.expect(StepResult).step_id for _ in "12"] == [1, 2]
    worker.join()
    worker.error = EngineError("ended already")  # nothing is left to shut down


def test_results_of_an_old_epoch_are_waited_for_and_dropped(scheduler, worker):
    scheduler.send(plan(1))
    worker.step(1).done.set()
    assert scheduler.expect(StepResult).step_id == 1
    scheduler.send(plan(2))
    running = worker.step(2)
    running_out = threading.Timer(0.05, running.done.set)
    running_out.start()
    assert scheduler.answer_hello().epoch == 2
    assert worker.runner.events[-2:] == ["finish 2", "forget"]
    scheduler.send(plan(3, epoch=2))
    worker.step(3).done.set()
    assert scheduler.expect(StepResult).step_id == 3


def test_a_fault_of_the_device_ends_the_process_with_its_reason(scheduler, worker):
    scheduler.send(plan(1))
    worker.step(1).error = RuntimeError("CUDA error: an illegal memory access was encountered")
    failed = scheduler.expect(WorkerFailed)
    assert failed.scope is FailureScope.PROCESS
    assert "step 1 broke" in failed.message
    assert "illegal memory access" in failed.message
    worker.join()
    assert isinstance(worker.error, EngineError)
