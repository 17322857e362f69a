"""The scheduler process over real sockets, with stand-ins for its peers."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from freetoken.config import Config
from freetoken.errors import ConfigError
from freetoken.scheduler.health import Health
from freetoken.scheduler.process import SchedulerProcess, claim, run
from freetoken.scheduler.scheduler import Scheduler
from freetoken.wire.messages import PROTOCOL_VERSION, Phase, Role, Sampling
from freetoken.wire.sockets import Endpoints, connect_dealer
from tests.fakes.api import FakeApi
from tests.fakes.model import complete
from tests.fakes.worker import FakeWorker, WorkerScript
from tests.scheduler.drive import sampling

LONG = [1 + i % 50 for i in range(100)]


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ft-") as path:
        yield Path(path)


@contextmanager
def scheduler_in(run_dir: Path, stall_timeout_s: float = 60.0) -> Iterator[Scheduler]:
    """The I/O loop in a thread; stopped and joined at the end, when nothing may be left over."""
    ours, theirs = socket.socketpair()
    scheduler = Scheduler(100, 100_000, lambda: 1)
    process = SchedulerProcess(
        Endpoints.in_directory(run_dir),
        scheduler,
        Health(stall_timeout_s),
        theirs.fileno(),
        report_s=0.05,
    )
    thread = threading.Thread(target=process.serve)
    with ours, theirs:
        thread.start()
        try:
            yield scheduler
        finally:
            ours.send(b"x")
            thread.join(10)
            assert not thread.is_alive()
    assert not list(run_dir.iterdir()), "sockets are left behind"


@contextmanager
def worker_in(run_dir: Path, script: WorkerScript | None = None) -> Iterator[FakeWorker]:
    worker = FakeWorker(run_dir, script).start()
    try:
        yield worker
    finally:
        worker.stop()


def expect(prompt: list[int], max_tokens: int) -> list[int]:
    return complete(prompt, max_tokens, sampling(), 256)


def control(api: FakeApi) -> None:
    """The small request at the end of each case, and the accounting back at its baseline."""
    assert api.complete("control", [3, 1, 4], 5) == expect([3, 1, 4], 5)
    seen = len(api.states)
    api.wait_for(lambda: len(api.states) > seen + 1)
    state = api.states[-1]
    assert state.phase is Phase.READY
    assert state.running == state.waiting == state.counters["pages_used"] == 0


def test_a_request_crosses_all_three_processes(run_dir: Path) -> None:
    with scheduler_in(run_dir), worker_in(run_dir), FakeApi(run_dir) as api:
        api.connect()
        assert api.wait_phase(Phase.READY).context_tokens == 1024
        assert api.complete("a", LONG, 50) == expect(LONG, 50)
        assert api.accepted["a"].max_tokens == 50
        control(api)


def test_a_prompt_beyond_the_context_is_refused_while_a_small_one_runs(run_dir: Path) -> None:
    script = WorkerScript(num_pages=8, step_ms=5)
    with scheduler_in(run_dir), worker_in(run_dir, script), FakeApi(run_dir) as api:
        api.connect().wait_phase(Phase.READY)
        api.submit("small", [1, 2, 3], 90)
        api.submit("big", [1] * 200)
        api.wait_end("big", patience_s=1.0)
        assert not api.is_done("small")
        (failed,) = api.failed["big"]
        assert failed.code == "context_length_exceeded"
        assert failed.message.startswith("prompt needs 200 tokens (13 pages of 16), the pool holds")
        assert "big" not in api.accepted
        api.wait_end("small")
        assert api.text("small") == expect([1, 2, 3], 90)
        control(api)


def test_the_phases_of_loading_are_told_with_progress(run_dir: Path) -> None:
    with scheduler_in(run_dir), FakeApi(run_dir) as api:
        api.connect().wait_phase(Phase.STARTING)
        api.submit("early", [1])
        api.wait_end("early")
        assert api.failed["early"][0].code == "engine_unavailable"
        assert api.failed["early"][0].retry_after_s is not None
        with worker_in(run_dir, WorkerScript(load_s=1.2)):
            loading = api.wait_phase(Phase.LOADING)
            assert loading.detail == "reading weights"
            assert loading.total_bytes == 100
            assert loading.context_tokens == 0
            api.wait_for(lambda: api.states[-1].loaded_bytes > loading.loaded_bytes)
            api.wait_phase(Phase.READY)
            control(api)


def test_a_failed_step_fails_its_request_and_serving_goes_on(run_dir: Path) -> None:
    script = WorkerScript(fail_steps=(2, 3, 4))
    with scheduler_in(run_dir), worker_in(run_dir, script), FakeApi(run_dir) as api:
        api.connect().wait_phase(Phase.READY)
        api.states.clear()
        api.submit("a", LONG, 5)
        api.wait_end("a")
        (failed,) = api.failed["a"]
        assert failed.code == "step_failed"
        assert "out of fake memory" in failed.message
        api.wait_for(lambda: _ends_well(api))
        assert {state.phase for state in api.states} <= {Phase.READY, Phase.STALLED}
        control(api)


def _ends_well(api: FakeApi) -> bool:
    """Submit until the script's failures are used up."""
    name = f"try-{len(api.failed)}"
    if name not in api.accepted:
        api.submit(name, [1, 2], 2)
        api.wait_for(lambda: name in api.accepted)
    return bool(api.deltas.get(name)) and api.is_done(name)


def test_malformed_frames_are_counted_and_harm_nobody(run_dir: Path) -> None:
    script = WorkerScript(garbage_steps=(2, 3))
    with scheduler_in(run_dir), worker_in(run_dir, script), FakeApi(run_dir) as api:
        api.connect().wait_phase(Phase.READY)
        rng = random.Random(1)
        for size in (0, 1, 7, 1000):
            api.socket.send(rng.randbytes(size))
        api.socket.send(b"\x91" * 100_000)
        api.socket.send(b"\xdd\xff\xff\xff\xff")
        api.socket.send_multipart([b"a", b"b", b"c"])
        assert api.complete("a", [1, 2, 3], 9) == expect([1, 2, 3], 9)
        api.wait_for(lambda: api.states[-1].counters["malformed_frames"] >= 9)
        control(api)


def test_a_lost_result_costs_time_but_no_text(run_dir: Path) -> None:
    """The one in the middle is missed when the next comes, the last one when it is overdue."""
    script = WorkerScript(lost_steps=(4, 17))
    with (
        scheduler_in(run_dir, stall_timeout_s=0.3),
        worker_in(run_dir, script) as worker,
        FakeApi(run_dir) as api,
    ):
        api.connect().wait_phase(Phase.READY)
        assert api.complete("a", [1, 2, 3], 9) == expect([1, 2, 3], 9)
        while worker.num_steps < 16:
            assert api.complete(f"b{worker.num_steps}", [4], 1) == expect([4], 1)
        assert api.complete("c", [1, 2], 1) == expect([1, 2], 1)
        assert api.states[-1].counters["malformed_frames"] == 2
        assert len(worker.epochs) == 1
        control(api)


def test_a_result_that_names_other_rows_fails_the_step_only(run_dir: Path) -> None:
    script = WorkerScript(wrong_steps=(2,))
    with scheduler_in(run_dir), worker_in(run_dir, script), FakeApi(run_dir) as api:
        api.connect().wait_phase(Phase.READY)
        api.submit("a", [1, 2, 3], 9)
        api.wait_end("a")
        assert "does not match its plan" in api.failed["a"][0].message
        control(api)


def test_a_stalled_worker_is_not_ready_until_it_goes_on(run_dir: Path) -> None:
    script = WorkerScript(stall_step=3)
    with (
        scheduler_in(run_dir, stall_timeout_s=1.0),
        worker_in(run_dir, script) as worker,
        FakeApi(run_dir) as api,
    ):
        api.connect().wait_phase(Phase.READY)
        api.submit("a", [1, 2, 3], 9)
        api.wait_phase(Phase.STALLED)
        worker.released.set()
        api.wait_phase(Phase.READY)
        api.wait_end("a")
        assert api.text("a") == expect([1, 2, 3], 9)
        control(api)


def test_a_worker_that_is_stalled_too_long_is_given_up_and_another_may_come(run_dir: Path) -> None:
    script = WorkerScript(stall_step=3)
    with (
        scheduler_in(run_dir, stall_timeout_s=0.3),
        worker_in(run_dir, script) as worker,
        FakeApi(run_dir) as api,
    ):
        api.connect().wait_phase(Phase.READY)
        assert api.states[-1].given_up_pid == 0
        api.submit("a", [1, 2, 3], 9)
        api.wait_end("a")
        assert "has not ended a step in 1 s" in api.failed["a"][0].message
        assert api.wait_phase(Phase.DEAD).given_up_pid == os.getpid()
        with worker_in(run_dir):
            assert api.wait_phase(Phase.READY).given_up_pid == 0
            worker.released.set()
            api.wait_for(lambda: worker.shutdown is not None)
            control(api)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (WorkerScript(die_step=4), "the fake device is gone"),
        (WorkerScript(kill_step=4), "has exited"),
    ],
)
def test_a_dead_worker_ends_every_request_within_two_seconds_and_another_may_come(
    run_dir: Path, script: WorkerScript, reason: str
) -> None:
    with scheduler_in(run_dir) as scheduler, FakeApi(run_dir) as api:
        first = _worker_process(run_dir, script)
        api.connect().wait_phase(Phase.READY)
        api.submit("a", [1, 2, 3], 100)
        api.submit("b", LONG, 100)
        api.wait_end("a", "b", patience_s=2.0)
        for name in ("a", "b"):
            (failed,) = api.failed[name]
            assert failed.code == "engine_unavailable"
            assert reason in failed.message
            assert not any(delta.finish_reason for delta in api.deltas.get(name, []))
        assert reason in api.wait_phase(Phase.DEAD, 2.0).detail
        api.submit("c", [1], 1)
        api.wait_end("c", patience_s=1.0)
        assert api.failed["c"][0].code == "engine_unavailable"
        assert first.wait(10) != 0
        with worker_in(run_dir) as second:
            api.wait_phase(Phase.READY)
            control(api)
            assert len(second.epochs) == 1
        assert scheduler.counters.workers_lost >= 1


def _worker_process(run_dir: Path, script: WorkerScript) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-m", "tests.fakes.worker", "--run-dir", str(run_dir)]
    for name in ("die_step", "kill_step"):
        value = getattr(script, name)
        if value is not None:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    return subprocess.Popen(arguments)


def test_a_second_worker_is_refused_while_the_first_lives(run_dir: Path) -> None:
    with scheduler_in(run_dir), worker_in(run_dir) as first, FakeApi(run_dir) as api:
        api.connect().wait_phase(Phase.READY)
        with worker_in(run_dir) as second:
            api.wait_for(lambda: second.refused is not None)
        assert first.epochs
        control(api)


def test_a_worker_whose_context_exceeds_its_pool_is_sent_away(run_dir: Path) -> None:
    script = WorkerScript(num_pages=4, page_size=16, context_tokens=65)
    with scheduler_in(run_dir), worker_in(run_dir, script) as worker, FakeApi(run_dir) as api:
        api.connect()
        state = api.wait_phase(Phase.DEAD)
        assert "context_tokens is 65, it must be in [2, 64]" in state.detail
        worker._thread.join(5)
        assert worker.shutdown is not None


def test_peers_survive_a_scheduler_that_is_killed(run_dir: Path) -> None:
    """The sockets' files are left behind; the next scheduler takes over, the worker joins it."""
    with worker_in(run_dir) as worker, FakeApi(run_dir) as api:
        first = _scheduler_process(run_dir)
        api.connect().wait_phase(Phase.READY)
        before = api.welcome
        assert before is not None
        first.kill()
        first.wait()
        with scheduler_in(run_dir):
            api.welcome = None
            api.states.clear()
            api.connect().wait_phase(Phase.READY)
            assert api.welcome is not None
            assert api.welcome.epoch != before.epoch
            assert len(set(worker.epochs)) == 2
            control(api)


def _scheduler_process(run_dir: Path) -> subprocess.Popen[bytes]:
    code = (
        "import sys, pathlib; from freetoken.config import Config; "
        "from freetoken.scheduler.process import run; "
        "sys.exit(run(Config(run_dir=pathlib.Path(sys.argv[1]))))"
    )
    return subprocess.Popen([sys.executable, "-c", code, str(run_dir)])


def test_peers_of_another_protocol_or_role_are_refused(run_dir: Path) -> None:
    with scheduler_in(run_dir):
        with FakeApi(run_dir) as api:
            api.hello(protocol=PROTOCOL_VERSION + 1)
            api.wait_for(lambda: api.refused is not None)
            assert f"protocol {PROTOCOL_VERSION + 1}" in str(api.refused)
        with FakeApi(run_dir) as api:
            api.hello(role=Role.WORKER)
            api.wait_for(lambda: api.refused is not None)
            assert "wrong socket" in str(api.refused)


def test_who_has_not_said_hello_gets_a_failure_not_silence(run_dir: Path) -> None:
    with scheduler_in(run_dir), FakeApi(run_dir) as api:
        api.submit("a", [1])
        api.wait_end("a")
        assert api.failed["a"][0].code == "engine_unavailable"


def test_a_dead_api_takes_only_its_own_requests_with_it(run_dir: Path) -> None:
    """The one that dies names the pid of a process that we end."""
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    script = WorkerScript(step_ms=3)
    with scheduler_in(run_dir), worker_in(run_dir, script), FakeApi(run_dir) as api:
        api.connect().wait_phase(Phase.READY)
        with FakeApi(run_dir, pid=sleeper.pid) as other:
            other.connect()
            other.submit("theirs", [1, 2], 900)
            api.submit("mine", [3, 4], 60)
            other.wait_for(lambda: "theirs" in other.deltas)
            sleeper.communicate(b"\n")
            api.wait_for(lambda: api.states[-1].counters["requests_aborted"] == 1)
        api.wait_end("mine")
        assert api.text("mine") == expect([3, 4], 60)
        control(api)


def test_an_api_that_says_hello_on_a_new_socket_leaves_nothing_behind_on_the_old(
    run_dir: Path,
) -> None:
    """It thought that we were lost and has failed its requests: nobody waits for them."""
    with (
        scheduler_in(run_dir),
        worker_in(run_dir, WorkerScript(step_ms=3)),
        FakeApi(run_dir) as old,
        FakeApi(run_dir) as new,
    ):
        old.connect().wait_phase(Phase.READY)
        old.submit("theirs", [1, 2], 900)
        old.wait_for(lambda: "theirs" in old.deltas)
        new.name = old.name
        new.connect().wait_phase(Phase.READY)
        new.wait_for(lambda: new.states[-1].counters["requests_aborted"] == 1, 2)
        control(new)


def test_disconnects_at_random_moments_leave_nothing_behind(run_dir: Path) -> None:
    """Two hundred aborts: queued, between chunks, while decoding, at the finish, twice."""
    rng = random.Random(5)
    script = WorkerScript(num_pages=48, page_size=4, max_rows=4, max_step_tokens=16)
    with scheduler_in(run_dir), worker_in(run_dir, script), FakeApi(run_dir) as api:
        api.connect().wait_phase(Phase.READY)
        open_ids: list[str] = []
        for i in range(200):
            name = f"r{i}"
            api.submit(name, LONG[: rng.randint(1, 90)], rng.choice([1, 3, 30]))
            open_ids.append(name)
            if rng.random() < 0.5:
                message = api.dealer.receive(1)
                if message is not None:
                    api._note(message)
            if len(open_ids) > 6:
                api.abort(open_ids.pop(rng.randrange(len(open_ids))))
        for name in open_ids:
            api.abort(name)
            api.abort(name)
        names = [f"r{i}" for i in range(200)]
        api.wait_end(*names, patience_s=30)
        for name in names:
            ends = [d for d in api.deltas.get(name, []) if d.finish_reason]
            assert len(ends) + len(api.failed.get(name, [])) == 1
        assert not api.failed
        assert api.complete("follow-up", LONG, 9) == expect(LONG, 9)
        control(api)


def test_an_api_that_does_not_read_is_cut_off_and_the_rest_goes_on(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket takes four messages; what it was owed arrives when it reads again."""
    monkeypatch.setattr("freetoken.wire.sockets.HIGH_WATER_MARK", 4)
    script = WorkerScript(step_ms=0.2, num_pages=256)
    with (
        scheduler_in(run_dir) as scheduler,
        worker_in(run_dir, script),
        FakeApi(run_dir) as deaf,
        FakeApi(run_dir) as api,
    ):
        deaf.connect().wait_phase(Phase.READY)
        api.connect().wait_phase(Phase.READY)
        deaf.submit("theirs", [1, 2, 3], None, Sampling(temperature=0.0, seed=1, logprobs=20))
        api.wait_for(lambda: scheduler.counters.requests_aborted == 1, patience_s=30)
        deaf.wait_end("theirs")
        assert deaf.failed["theirs"][0].code == "engine_unavailable"
        control(api)


def test_sigterm_ends_the_process_cleanly_and_tells_everyone(run_dir: Path) -> None:
    scheduler = _scheduler_process(run_dir)
    try:
        with worker_in(run_dir, WorkerScript(step_ms=5)) as worker, FakeApi(run_dir) as api:
            api.connect().wait_phase(Phase.READY)
            with pytest.raises(ConfigError, match="another scheduler is running"):
                claim(run_dir)
            api.submit("a", [1, 2], 500)
            api.wait_for(lambda: "a" in api.deltas)
            started_s = time.monotonic()
            scheduler.send_signal(signal.SIGTERM)
            api.wait_end("a")
            assert api.failed["a"][0].code == "engine_unavailable"
            assert scheduler.wait(5) == 0
            assert time.monotonic() - started_s < 2.5
            worker._thread.join(5)
            assert worker.shutdown == "the scheduler is ending"
    finally:
        scheduler.kill()
        scheduler.wait()
    assert not list(run_dir.iterdir())


def test_run_needs_a_directory_and_says_so() -> None:
    with pytest.raises(ConfigError, match="--run-dir"):
        run(Config())


def test_a_hello_with_an_impossible_pid_is_just_a_peer_without_exit_notice(run_dir: Path) -> None:
    with scheduler_in(run_dir), worker_in(run_dir):
        for pid in (-1, 0, 1 << 40):
            with FakeApi(run_dir, pid=pid) as api:
                api.connect().wait_phase(Phase.READY)
                control(api)


def test_a_silent_dealer_is_no_peer(run_dir: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with scheduler_in(run_dir), worker_in(run_dir), FakeApi(run_dir) as api:
        silent = connect_dealer(context, Endpoints.in_directory(run_dir).api, "silent")
        api.connect().wait_phase(Phase.READY)
        control(api)
        silent.close(0)
    context.term()
