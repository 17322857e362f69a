"""One server shared by the tests that leave it serving; in the order of the file."""

import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import Server, await_server, await_status, start
from tests.processes import is_gone, kill


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path, runtime: Path) -> Iterator[Server]:
    with start(tiny_checkpoint, runtime, "--port", "0") as running:
        yield await_server(running, runtime)


def test_phases_are_printed_with_seconds_then_context(server: Server) -> None:
    shown = re.findall(r"(?m)^  (\w+) +([\d.]+) s", server.running.output)
    names = [name for name, _ in shown]
    assert names[0] == "checked"
    assert names[-1] == "ready"
    assert names == sorted(names, key=["checked", "starting", "loading", "checking", "ready"].index)
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
    assert all(is_gone(pid, 0) for pid in pids.values())
    assert list(server.runtime.iterdir()) == []
