"""One server shared by the tests that leave it serving; in the order of the file."""

import json
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import START_S, Server, await_server, await_status, start
from tests.processes import is_gone, kill


@pytest.fixture(scope="module")
def manager() -> Iterator[socket.socket]:
    """A service manager's socket."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock,
    ):
        sock.bind(f"{directory}/notify")
        sock.settimeout(START_S)
        yield sock


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path, runtime: Path, manager: socket.socket) -> Iterator[Server]:
    notify = str(manager.getsockname())
    with start(tiny_checkpoint, runtime, "--port", "0", NOTIFY_SOCKET=notify) as running:
        while b"READY=1" not in manager.recv(4096):
            assert "is served at" not in running.output
        yield await_server(running, runtime)


def test_the_service_manager_was_told_when_requests_are_answered(server: Server) -> None:
    assert server.is_ready()
    assert server.complete()


def test_phases_are_printed_with_seconds_then_context(server: Server) -> None:
    shown = re.findall(r"(?m)^  (\w+) +([\d.]+) s", server.running.output)
    names = [name for name, _ in groupby(name for name, _ in shown)]
    assert names[0] == "checked"
    assert names[-1] == "ready"
    # Each is seen if it lasts; the self-check is before loading, the warm-up after it.
    order = iter(["checked", "starting", "checking", "loading", "checking", "ready"])
    assert all(name in order for name in names), names
    context = httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
    assert context == 512, "32 pages of 16"
    assert f"effective context: {context} tokens" in server.running.output


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_printed_curl_line_works(server: Server) -> None:
    line = server.running.wait_for(r"(?m)^  (curl .*)$")[1]
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"] is not None
    assert answer["model"] == "tiny-moe"


def test_processes_have_their_names_and_options_stay_out_of_sight(server: Server) -> None:
    assert server.pids.keys() == {"api", "scheduler", "worker"}


def test_the_run_directory_is_private(server: Server) -> None:
    (run_dir,) = server.runtime.iterdir()
    assert run_dir.stat().st_mode & 0o777 == 0o700
    assert (run_dir / "config.toml").stat().st_mode & 0o777 == 0o600


def test_a_killed_api_comes_again_without_loading_the_model(server: Server) -> None:
    before, text = server.pids, server.complete()
    kill(before["api"])
    assert is_gone(before["api"], 3)
    await_status(server.url, 200, 20)
    after = server.pids
    assert after["api"] != before["api"]
    assert {**after, "api": 0} == {**before, "api": 0}
    assert server.complete() == text


def test_ctrl_c_ends_all_within_five_seconds_and_leaves_nothing(server: Server) -> None:
    pids = server.pids
    server.running.process.send_signal(signal.SIGINT)
    assert server.running.wait(5) == 0
    assert server.running.last_line == "stopped"
    assert all(is_gone(pid, 0) for pid in pids.values())
    assert list(server.runtime.iterdir()) == []
