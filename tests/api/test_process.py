"""The api as a process of its own, in a fresh interpreter."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from freetoken.api.listen import bind_sockets, url_of
from freetoken.errors import ConfigError
from tests.api.fake_scheduler import FakeScheduler, saying

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
EOS = 2

DRIVER = """
import json, sys
from freetoken.api.process import run
from freetoken.config import Config
from freetoken.errors import EngineError

try:
    code = run(Config(**json.loads(sys.argv[1])))
except EngineError as error:
    print(error)
    code = error.exit_code
heavy = {"torch", "triton", "safetensors"} & set(sys.modules)
rooms = {name for name in sys.modules if name.startswith(
    ("freetoken.scheduler", "freetoken.worker", "freetoken.model", "freetoken.experts"))}
print(json.dumps({"heavy": sorted(heavy | rooms)}))
sys.exit(code)
"""


def start(**options: object) -> subprocess.Popen[str]:
    options = {key: str(value) for key, value in options.items()}
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


@pytest.fixture
def scheduler(run_dir: Path) -> Iterator[FakeScheduler]:
    fake = FakeScheduler(run_dir)
    yield fake
    fake.stop()


def read_url(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if "http.listen" in line:
            assert "freetoken-api" in line
            return line.split("urls=")[1].strip()
    raise AssertionError("the api never listened")


def wait_ready(url: str) -> None:
    end_s = time.monotonic() + 20
    while httpx.get(f"{url}/health/ready", verify=False).status_code != 200:
        assert time.monotonic() < end_s


def test_a_whole_life_loads_no_torch_and_ends_cleanly_with_sigterm(
    model_dir: Path, run_dir: Path, scheduler: FakeScheduler
) -> None:
    scheduler.reply = saying([EOS])
    process = start(model=model_dir, run_dir=run_dir, port=0)
    url = read_url(process)
    wait_ready(url)
    assert httpx.post(f"{url}/v1/chat/completions", json=CHAT, verify=False).status_code == 200
    names = httpx.get(f"{url}/v1/models", verify=False).json()["data"]
    assert [model["id"] for model in names] == ["tiny-model"]
    title = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    assert title.startswith(b"freetoken-api")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 0, err
    assert json.loads(out) == {"heavy": []}
    assert "Traceback" not in err


def test_sigterm_ends_a_stream_with_an_error_event_within_five_seconds(
    model_dir: Path, run_dir: Path, scheduler: FakeScheduler
) -> None:
    process = start(model=model_dir, run_dir=run_dir, port=0)
    url = read_url(process)
    wait_ready(url)
    body = {**CHAT, "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, verify=False) as stream:
        scheduler.wait_submit()
        process.send_signal(signal.SIGTERM)
        sent_s = time.monotonic()
        lines = [line for line in stream.iter_lines() if line]
    _, err = process.communicate(timeout=10)
    assert time.monotonic() - sent_s < 5
    assert '"code":"engine_unavailable"' in lines[-1]
    assert process.returncode == 0, err


def test_a_refused_api_exits_with_the_reason(
    model_dir: Path, run_dir: Path, scheduler: FakeScheduler
) -> None:
    scheduler.refusal = "this api is too old"
    process = start(model=model_dir, run_dir=run_dir, port=0)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "this api is too old" in out


def test_a_busy_port_is_named_before_anything_else(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*another --port"):
            bind_sockets("127.0.0.1", port)
        process = start(model=tmp_path / "nothing", run_dir=tmp_path, port=port)
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 2
    assert f"127.0.0.1:{port}" in out


def test_a_host_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--host no\.such\.host\.invalid"):
        bind_sockets("no.such.host.invalid", 0)
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1"):
        bind_sockets("203.0.113.1", 0)


def test_localhost_listens_on_one_port_for_each_of_its_addresses() -> None:
    sockets = bind_sockets("localhost", 0)
    try:
        assert len({sock.getsockname()[1] for sock in sockets}) == 1
        assert url_of(sockets[0]).startswith("http://")
    finally:
        for sock in sockets:
            sock.close()


@pytest.mark.parametrize("missing", ["model", "run_dir"])
def test_what_the_api_cannot_do_without_is_asked_for(
    model_dir: Path, run_dir: Path, missing: str
) -> None:
    options = {"model": model_dir, "run_dir": run_dir, "port": 0}
    del options[missing]
    process = start(**options)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "--" + missing.replace("_", "-") in out
