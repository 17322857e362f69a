"""The worker's loop over real sockets, against a scripted scheduler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from freetoken.config import Config
from freetoken.errors import ConfigError, EngineError
from freetoken.wire.messages import (
    PROTOCOL_VERSION,
    FailureScope,
    Hello,
    Phase,
    Refused,
    Role,
    Shutdown,
    StepResult,
    Welcome,
    WorkerFailed,
)
from freetoken.worker import process
from freetoken.worker.process import serve
from tests.worker.fakes import HashSource, expected_next, expected_text
from tests.worker.plans import decode_plan, start_plan, tokens_of
from tests.worker.scripted import ScriptedScheduler


class WorkerThread:
    """`serve` in a thread; `join` gives what it raised."""

    def __init__(self, run_dir, source=None, **options):
        self.source = source or HashSource()
        self._config = Config(
            model="tiny", run_dir=run_dir, threads=1, page_size=4, max_rows=4, **options
        )
        self._error = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            serve(self._config, self.source)
        except Exception as error:
            self._error = error

    def join(self):
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()
        return self._error


@pytest.fixture
def scheduler(run_dir):
    scheduler = ScriptedScheduler(run_dir)
    yield scheduler
    scheduler.close()


@pytest.fixture
def run_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("w")


def finish(scheduler, worker):
    scheduler.send(Shutdown("the test is over"))
    assert worker.join() is None


def wait_until(condition):
    """Poll with a deadline: what is awaited happens in another thread."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_the_worker_announces_what_the_plan_allows(run_dir, scheduler):
    worker = WorkerThread(run_dir, context_tokens=100, num_tokens=128)
    hello = scheduler.expect(Hello)
    assert (hello.role, hello.pid) == (Role.WORKER, os.getpid())
    ready = scheduler.answer_hello()
    assert (ready.epoch, ready.num_pages, ready.page_size, ready.context_tokens) == (1, 32, 4, 128)
    assert (ready.window, ready.max_rows, ready.max_on_demand_tokens) == (256, 4, None)
    assert ready.plan["kv"] == 33 * 4 * 8
    assert worker.source.num_checks == 1, "at every start"
    finish(scheduler, worker)


def test_two_queued_plans_are_answered_in_order(run_dir, scheduler):
    worker = WorkerThread(run_dir)
    scheduler.welcome()
    prompt = [1, 2, 3]
    scheduler.send(start_plan(0, prompt, 0))
    scheduler.send(decode_plan({0: 3}, step_id=2))
    results = [scheduler.expect(StepResult) for _ in range(2)]
    assert [result.step_id for result in results] == [1, 2]
    assert [tokens_of(result)[0] for result in results] == expected_text(prompt, 2)
    finish(scheduler, worker)


def test_a_failed_step_is_reported_and_the_next_one_runs(run_dir, scheduler):
    worker = WorkerThread(run_dir)
    scheduler.welcome()
    scheduler.send(start_plan(0, [1], 0))
    scheduler.expect(StepResult)
    scheduler.send(start_plan(1, [10**6], 8, step_id=2))
    failed = scheduler.expect(WorkerFailed)
    assert (failed.scope, failed.step_id, failed.epoch) == (FailureScope.STEP, 2, 1)
    assert "1000000" in failed.message
    scheduler.send(start_plan(2, [7, 8], 16, step_id=3))
    assert tokens_of(scheduler.expect(StepResult)) == {2: expected_next([7, 8])}
    finish(scheduler, worker)


def test_a_broken_model_ends_the_process_and_says_why(run_dir, scheduler):
    source = HashSource()
    worker = WorkerThread(run_dir, source)
    scheduler.welcome()

    def fail(ids):
        raise RuntimeError("CUDA error: an illegal memory access")

    source.model.fails = fail
    scheduler.send(start_plan(0, [1], 0, step_id=9))
    failed = scheduler.expect(WorkerFailed)
    assert failed.scope is FailureScope.PROCESS
    assert "illegal memory access" in failed.message
    error = worker.join()
    assert isinstance(error, EngineError)
    assert "step 9" in str(error)


def test_a_plan_that_does_not_fit_is_refused_before_loading(run_dir, scheduler):
    worker = WorkerThread(run_dir, HashSource(dense_bytes=1 << 50))
    error = worker.join()
    assert isinstance(error, ConfigError)
    assert "short" in str(error)
    assert worker.source.num_loads == 0


def test_a_class_that_fails_the_self_check_is_refused_before_loading(run_dir, scheduler):
    class Wrong(HashSource):
        def check(self, experts):
            raise EngineError("HashModel cannot be served: logits differ")

    worker = WorkerThread(run_dir, Wrong())
    assert "logits differ" in str(worker.join())
    assert worker.source.num_loads == 0


def test_failing_to_load_is_told_to_a_scheduler_that_has_welcomed_us(run_dir, scheduler):
    welcomed = threading.Event()

    class Failing(HashSource):
        def load(self, experts, num_slots, context_tokens, report):
            welcomed.wait(20)
            raise EngineError("shard 3 is damaged")

    worker = WorkerThread(run_dir, Failing())
    scheduler.expect(Hello)
    scheduler.send(Welcome(PROTOCOL_VERSION, os.getpid(), 5))
    welcomed.set()
    failed = scheduler.expect(WorkerFailed)
    assert (failed.scope, failed.epoch, failed.message) == (
        FailureScope.PROCESS,
        5,
        "shard 3 is damaged",
    )
    assert isinstance(worker.join(), EngineError)


def test_beats_tell_the_phase_and_bytes_while_loading(run_dir, scheduler):
    may_go_on = threading.Event()

    class Slow(HashSource):
        def load(self, experts, num_slots, context_tokens, report):
            report("reading shard 1", 30, 90)
            may_go_on.wait(20)
            return self.model

    worker = WorkerThread(run_dir, Slow())
    name = scheduler.expect(Hello).name

    def is_told():
        heard = scheduler.beats.heard(name)
        return heard is not None and (heard.beat.phase, heard.beat.done, heard.beat.total) == (
            Phase.LOADING,
            30,
            90,
        )

    wait_until(is_told)
    may_go_on.set()
    scheduler.answer_hello()
    wait_until(lambda: scheduler.beats.heard(name).beat.phase is Phase.READY)
    finish(scheduler, worker)


def test_plans_of_an_old_epoch_are_dropped(run_dir, scheduler):
    worker = WorkerThread(run_dir)
    scheduler.welcome()
    scheduler.send(start_plan(0, [1], 0, epoch=0))
    scheduler.send(start_plan(0, [2], 0, epoch=1, step_id=2))
    assert scheduler.expect(StepResult).step_id == 2
    finish(scheduler, worker)


def test_a_second_welcome_begins_a_new_epoch_without_rows(run_dir, scheduler):
    worker = WorkerThread(run_dir)
    scheduler.welcome()
    scheduler.send(start_plan(0, [1], 0))
    scheduler.expect(StepResult)
    assert scheduler.answer_hello().epoch == 2
    scheduler.send(start_plan(0, [2, 3], 0, epoch=2))
    assert tokens_of(scheduler.expect(StepResult)) == {0: expected_next([2, 3])}
    finish(scheduler, worker)


def test_a_refusal_ends_the_worker_with_the_reason(run_dir, scheduler):
    worker = WorkerThread(run_dir)
    scheduler.expect(Hello)
    scheduler.send(Refused("one worker is enough"))
    assert "one worker is enough" in str(worker.join())


def test_a_worker_too_many_hears_it_before_it_loads(run_dir, scheduler, monkeypatch):
    monkeypatch.setattr(process, "ANSWER_MS", 20_000)
    worker = WorkerThread(run_dir)
    scheduler.expect(Hello)
    scheduler.send(Refused("one worker is enough"))
    assert "one worker is enough" in str(worker.join())
    assert worker.source.num_loads == 0


def test_another_protocol_ends_the_worker(run_dir, scheduler):
    worker = WorkerThread(run_dir)
    scheduler.expect(Hello)
    scheduler.send(Welcome(999, os.getpid(), 1))
    assert "protocol 999" in str(worker.join())


@pytest.fixture
def sleeper():
    """A process to die in the scheduler's place."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_a_scheduler_that_dies_is_greeted_again_without_loading(run_dir, sleeper):
    first = ScriptedScheduler(run_dir, pid=sleeper.pid)
    worker = WorkerThread(run_dir)
    first.welcome()
    first.send(start_plan(0, [1], 0))
    first.expect(StepResult)
    sleeper.kill()
    hello = first.expect(Hello)
    first.close()
    second = ScriptedScheduler(run_dir, epoch=8)
    second.worker_epoch = 10
    assert second.welcome().epoch == 11
    second.send(start_plan(0, [5], 0, epoch=11))
    assert tokens_of(second.expect(StepResult)) == {0: expected_next([5])}
    assert worker.source.num_loads == 1
    assert hello.name
    finish(second, worker)
    second.close()


def test_another_life_of_the_scheduler_is_noticed_by_its_beats(run_dir, scheduler):
    worker = WorkerThread(run_dir)
    scheduler.welcome()
    scheduler.send(start_plan(0, [1], 0))
    scheduler.expect(StepResult)
    wait_until(lambda: scheduler.beats.heard(scheduler.peer.decode()) is not None)
    first_s = scheduler.beats.heard(scheduler.peer.decode()).at_s
    wait_until(lambda: scheduler.beats.heard(scheduler.peer.decode()).at_s > first_s + 1.2)
    scheduler.epoch = 99
    scheduler.expect(Hello)
    assert scheduler.answer_hello().epoch == 2
    finish(scheduler, worker)


SCRIPT = """
import sys
from pathlib import Path
from freetoken.config import Config
from freetoken.worker import process

sys.path.insert(0, sys.argv[1])
import fakes

process.open_source = lambda config: getattr(fakes, sys.argv[2])()
sys.exit(process.run(Config(model="tiny", run_dir=Path(sys.argv[3]), threads=1)))
"""


@contextmanager
def start_process(run_dir, source):
    here = str(Path(__file__).parent)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, here, source, str(run_dir)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_signal_ends_a_serving_worker_cleanly(run_dir, scheduler):
    with start_process(run_dir, "HashSource") as process:
        scheduler.welcome()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=5) == 0


@pytest.mark.parametrize(
    "source", [pytest.param("StuckSource", marks=pytest.mark.slow), "SleepySource"]
)
def test_a_signal_ends_a_worker_that_is_loading_within_five_seconds(run_dir, scheduler, source):
    with start_process(run_dir, source) as process:
        name = scheduler.expect(Hello).name
        heard = scheduler.beats.heard
        wait_until(lambda: heard(name) is not None and heard(name).beat.detail == "stuck now")
        process.terminate()
        assert process.wait(timeout=5) == 0


@pytest.mark.parametrize(
    ("options", "has_gpu", "loads"),
    [
        ({}, True, True),
        ({"device": "cuda"}, True, True),
        ({"device": "cpu"}, True, False),
        ({"compile": "off"}, True, False),
        ({}, False, False),
    ],
)
def test_a_worker_that_stands_by_loads_the_compiler_if_it_will_compile(
    options, has_gpu, loads, monkeypatch
):
    loaded = []
    monkeypatch.setenv("TORCH_WARM_POOL", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(process, "load_compiler", lambda: loaded.append(True))
    process.prepare(Config(**options))
    assert bool(loaded) == loads
