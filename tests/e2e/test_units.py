"""The three processes started one by one, in any order, without a launcher."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import await_status, status_of
from tests.processes import Running, free_port, ft, kill


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.slow
def test_the_api_outlives_the_others_and_serves_again_when_they_are_back(
    tiny_checkpoint: Path, runtime: Path, stack: ExitStack
) -> None:
    port = free_port()
    file = runtime / "ft.toml"
    file.write_text(
        f"model = {json.dumps(str(tiny_checkpoint))}\nport = {port}\nnum_pages = 32\nthreads = 1\n"
        f'api_key = "k"\nrun_dir = {json.dumps(str(runtime / "run"))}\n'
    )
    url = f"http://127.0.0.1:{port}"

    def start(name: str) -> Running:
        return stack.enter_context(ft(name, "--config", str(file), OMP_NUM_THREADS="1"))

    start("api")
    await_status(url, 503, 20)
    worker = start("worker")
    scheduler = start("scheduler")
    await_status(url, 200, 90)
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert complete(url)

    kill(scheduler.process.pid)
    await_status(url, 503, 3)
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=KEY)
    assert answer.status_code == 503
    assert "error" in answer.json()

    start("scheduler")
    await_status(url, 200, 20)
    assert worker.process.poll() is None, "it keeps its weights"
    assert complete(url)

    kill(worker.process.pid)
    await_status(url, 503, 3)
    start("worker")
    await_status(url, 200, 90)
    assert complete(url)

    third = start("scheduler")
    assert third.wait(20) == 2
    assert "another scheduler is running" in third.last_line
    assert status_of(url) == 200


KEY = {"Authorization": "Bearer k"}


def complete(url: str) -> bool:
    body = {"prompt": "abc", "max_tokens": 2, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=KEY, timeout=20)
    assert answer.status_code == 200, answer.text
    return bool(answer.json()["choices"][0]["finish_reason"] == "length")
