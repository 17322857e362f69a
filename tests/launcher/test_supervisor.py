import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from freetoken.wire.keeping import keeper_path
from freetoken.worker.keeper import LauncherKeeper
from tests.processes import ROOT, Running, clean_environment, free_port, is_gone, kill

DRIVER = str(ROOT / "tests/launcher/run_supervisor.py")
Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def start(*behaviours: str, port: int | None = None, **extra: str) -> Running:
        port = free_port() if port is None else port
        argv = [sys.executable, DRIVER, str(port), str(tmp_path), *behaviours]
        return Running(argv, clean_environment(**extra))

    return start


def pid_of(server: Running, name: str) -> int:
    return int(server.wait_for(rf"freetoken-{name} pid (\d+)")[1])


def pids_of(server: Running) -> list[int]:
    server.wait_for("serving fake with 64")
    return [pid_of(server, name) for name in ("scheduler", "worker", "api")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_cleanly(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    with start() as server:
        pids = pids_of(server)
        server.process.send_signal(number)
        assert server.wait(5) == 0
        assert all(is_gone(pid, 0) for pid in pids)
        assert list((tmp_path / "run").iterdir()) == []


def test_a_child_that_ignores_the_signal_is_killed_within_five_seconds(start: Start) -> None:
    with start("worker=deaf") as server:
        pids = pids_of(server)
        server.process.terminate()
        assert server.wait(5.5) == 0
        assert all(is_gone(pid, 0) for pid in pids)


def test_a_second_signal_does_not_wait(start: Start) -> None:
    with start("worker=deaf") as server:
        pids_of(server)
        server.process.terminate()
        assert is_gone(pid_of(server, "api"), 3)  # the first was heard
        server.process.terminate()
        begun_s = time.monotonic()
        assert server.wait(3) == 0
        assert time.monotonic() - begun_s < 2
        (after_s,) = re.findall(
            r"process.killed process=freetoken-worker after_s=(\S+)", server.output
        )
        assert float(after_s) < 4, "not after the time that it would have had"


@pytest.mark.parametrize("behaviour", ["well", "busy", "deaf"])
def test_children_end_when_the_launcher_is_killed(start: Start, behaviour: str) -> None:
    port = free_port()
    with start(f"worker={behaviour}", port=port) as server:
        pids = pids_of(server)
        kill(server.process.pid)
        assert all(is_gone(pid, 3) for pid in pids)
    with start(port=port) as again:  # the port and the run directory are free again
        pids_of(again)


@pytest.mark.parametrize("name", ["scheduler", "worker"])
def test_the_death_of_a_vital_room_ends_the_server_with_its_reason(start: Start, name: str) -> None:
    with start() as server:
        scheduler, worker, api = pids_of(server)
        begun_s = time.monotonic()
        kill({"scheduler": scheduler, "worker": worker}[name])
        assert server.wait(8) == 1
        lasted_s = time.monotonic() - begun_s
        assert server.last_line.startswith(f"last: freetoken-{name} was killed by SIGKILL")
        assert lasted_s > 1.9, "the api must answer 503 for two seconds more"
        assert all(is_gone(pid, 0) for pid in (scheduler, worker, api))


def test_a_refusal_while_starting_ends_at_once_with_its_exit_code(start: Start) -> None:
    with start("worker=refuses") as server:
        assert server.wait(10) == 2
        assert server.last_line == "last: freetoken-worker: no room for 7 pages"


def test_a_crash_while_starting_is_reported_with_its_last_line(start: Start) -> None:
    with start("worker=crashes") as server:
        assert server.wait(10) == 1
        assert server.last_line == (
            "last: freetoken-worker ended with exit code 1: RuntimeError: out of ideas"
        )


def test_a_dead_api_comes_again_and_the_others_stay(start: Start) -> None:
    with start() as server:
        scheduler, worker, api = pids_of(server)
        server.output = ""
        kill(api)
        assert pid_of(server, "api") != api
        assert not is_gone(scheduler, 0)
        assert not is_gone(worker, 0)
        server.process.terminate()
        assert server.wait(5) == 0


def test_an_api_that_dies_again_and_again_ends_the_server(start: Start) -> None:
    with start() as server:
        pids_of(server)
        for _ in range(6):
            api = pid_of(server, "api")
            server.output = ""
            kill(api)
        assert server.wait(10) == 1
        assert re.search(
            r"freetoken-api was killed by SIGKILL.*; 6 times in 60 s", server.last_line
        )


def test_what_a_killed_child_had_started_ends_too(start: Start) -> None:
    with start("worker=orphanable") as server:
        grandchild = int(server.wait_for(r"grandchild (\d+)")[1])
        pids_of(server)
        kill(pid_of(server, "worker"))
        assert server.wait(8) == 1
        assert is_gone(grandchild, 1)


def test_the_service_manager_is_told_of_readiness_and_stopping(
    start: Start, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(20)
        path = str(tmp_path / "notify")
        manager.bind(path)
        with start(NOTIFY_SOCKET=path, WATCHDOG_USEC="200000") as server:
            heard = [manager.recv(4096).decode()]
            while "WATCHDOG=1" not in heard[-1] or not any("READY=1" in text for text in heard):
                heard.append(manager.recv(4096).decode())
            first_ready = next(text for text in heard if "READY=1" in text)
            assert first_ready == "READY=1\nSTATUS=serving fake"
            assert "serving fake with 64" in server.wait_for("serving fake with 64")[0]
            server.process.terminate()
            while "STOPPING=1" not in heard[-1]:
                heard.append(manager.recv(4096).decode())
            assert server.wait(5) == 0


def test_a_second_server_in_the_same_run_directory_is_refused(start: Start) -> None:
    with start() as server:
        pids_of(server)
        second = start()
        with second:
            assert second.wait(10) != 0
        assert f"in use by another server (pid {server.process.pid})" in second.output


def test_a_hang_up_ends_the_server_unless_it_was_told_to_ignore_it(start: Start) -> None:
    with start() as server:
        pids_of(server)
        server.process.send_signal(signal.SIGHUP)
        assert server.wait(5) == 0
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        server = start()
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with server:
        pids_of(server)
        server.process.send_signal(signal.SIGHUP)
        kill(pid_of(server, "worker"))
        assert server.wait(8) == 1, "it went on and ended for another reason"


def test_children_end_when_the_launcher_is_killed_while_they_start(start: Start) -> None:
    with start() as server:
        launcher = psutil.Process(server.process.pid)
        deadline_s = time.monotonic() + 20
        while len(children := launcher.children()) < 3:
            assert time.monotonic() < deadline_s
        kill(server.process.pid)
        assert all(is_gone(child.pid, 3) for child in children)


def test_a_dead_worker_comes_again_as_often_as_it_may(start: Start) -> None:
    with start("restarts=2") as server:
        scheduler, worker, api = pids_of(server)
        for _ in range(2):
            server.output = ""
            kill(worker)
            worker = pid_of(server, "worker")
        assert not is_gone(scheduler, 0)
        assert not is_gone(api, 0)
        kill(worker)
        assert server.wait(8) == 1
        assert re.search(r"killed by SIGKILL .*; 3 times in 60 s$", server.last_line)


def test_one_that_was_given_up_and_does_not_end_is_killed(start: Start, tmp_path: Path) -> None:
    given_up = tmp_path / "given_up"
    with start("restarts=1", FAKE_DIR=str(tmp_path)) as server:
        pids = pids_of(server)
        scheduler, worker, _ = pids
        server.output = ""
        os.kill(worker, signal.SIGSTOP)
        given_up.write_text(f"{worker}")
        again = pid_of(server, "worker")
        assert "freetoken-worker hung and was killed: it sleeps" in server.output
        assert is_gone(worker, 0)
        given_up.write_text(f"{scheduler}")
        assert server.wait(20) == 1
        assert server.last_line == "last: freetoken-scheduler hung and was killed: it sleeps"
        assert all(is_gone(pid, 0) for pid in (*pids, again))


def standby_of(server: Running) -> int:
    return int(server.wait_for(r"standby pid (\d+)")[1])


def test_one_that_stands_by_takes_the_place_of_a_dead_worker(start: Start) -> None:
    with start("restarts=2", "standbys=worker") as server:
        _, worker, _ = pids_of(server)
        standby = standby_of(server)
        server.output = ""
        kill(worker)
        assert pid_of(server, "worker") == standby
        server.output = ""
        kill(standby)
        third = pid_of(server, "worker")  # nobody stood by: the fake is never seen to be away
        assert third not in (worker, standby)
        server.process.terminate()
        assert server.wait(5) == 0
        assert is_gone(third, 0)


def test_a_start_takes_longer_where_the_one_that_stood_by_is_dead(start: Start) -> None:
    with start("restarts=2", "standbys=worker") as server:
        _, worker, _ = pids_of(server)
        kill(standby_of(server))
        server.wait_for(r"standby\.ended .*SIGKILL")
        server.output = ""
        kill(worker)
        assert pid_of(server, "worker") != worker


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_one_that_stands_by_ends_with_the_launcher(start: Start, end: signal.Signals) -> None:
    with start("restarts=2", "standbys=worker") as server:
        pids = [*pids_of(server), standby_of(server)]
        server.process.send_signal(end)
        server.wait(5)
        assert all(is_gone(pid, 3) for pid in pids)


def test_a_worker_that_refuses_to_come_again_ends_the_server(start: Start, tmp_path: Path) -> None:
    with start("worker=refuses-again", "restarts=2", FAKE_DIR=str(tmp_path)) as server:
        kill(pids_of(server)[1])
        assert server.wait(10) == 2
        assert server.last_line == "last: freetoken-worker: no room for 7 pages"


def test_banks_outlive_the_worker_but_not_the_launcher(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with start("restarts=2") as server:
        _, worker, _ = pids_of(server)
        fd = os.memfd_create("banks")
        os.write(fd, b"experts")
        keeper = LauncherKeeper(keeper_path(path))
        keeper.keep("0" * 64, fd)
        for packet in (b"rubbish", b"KEEP " + b"1" * 64):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rude:
                rude.connect(str(keeper_path(path)))
                rude.send(packet)
                assert rude.recv(10) == b""
        os.close(fd)
        server.output = ""
        kill(worker)
        pid_of(server, "worker")
        again = keeper.take("0" * 64)
        assert again is not None
        assert os.pread(again, 7, 0) == b"experts"
        os.close(again)
        server.process.terminate()
        assert server.wait(5) == 0
        assert list(path.iterdir()) == []
