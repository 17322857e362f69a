"""Losing the scheduler and finding it again."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from freetoken.api import link
from freetoken.api.tokenizer import Tokenizer
from freetoken.errors import ProtocolError
from freetoken.wire.messages import EngineState, Phase
from tests.api.fake_scheduler import FakeScheduler, accept_only, delta, ready, saying
from tests.api.running import RunningApi

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
EOS = 2


@contextmanager
def stand_in() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose life stands for the scheduler's: the fake gives out its pid."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def start_api(stack: ExitStack, model_dir: Path, run_dir: Path) -> RunningApi:
    api = RunningApi(model_dir, run_dir)
    stack.callback(api.stop)
    return api


def start_fake(stack: ExitStack, run_dir: Path, epoch: int = 1, pid: int = 0) -> FakeScheduler:
    fake = FakeScheduler(run_dir, epoch=epoch, pid=pid)
    stack.callback(fake.stop)
    return fake


def test_the_api_may_start_long_before_the_scheduler(
    stack: ExitStack, model_dir: Path, run_dir: Path
) -> None:
    api = start_api(stack, model_dir, run_dir)
    body = api.http.get("/health/ready").json()
    assert body["phase"] == "starting"
    assert "scheduler" in body["detail"]
    assert api.http.post("/v1/chat/completions", json=CHAT).status_code == 503
    fake = start_fake(stack, run_dir)
    api.wait_ready()
    assert fake.hellos[0].role == "api"


def test_streams_and_plain_requests_end_with_an_error_when_the_scheduler_exits(
    stack: ExitStack, model_dir: Path, run_dir: Path, tokenizer: Tokenizer
) -> None:
    process = stack.enter_context(stand_in())
    fake = start_fake(stack, run_dir, pid=process.pid)
    api = start_api(stack, model_dir, run_dir)
    api.wait_ready()
    fake.reply = accept_only
    request = {**CHAT, "stream": True}
    with httpx.stream("POST", f"{api.url}/v1/chat/completions", json=request, timeout=10) as stream:
        submit = fake.wait_submit()
        fake.say(delta(submit.request_id, tokenizer.encode("ab", add_special_tokens=False)))
        lines = stream.iter_lines()
        while '"content":"ab"' not in next(lines):
            pass
        process.kill()
        killed_s = time.monotonic()
        rest = [line for line in lines if line]
        assert time.monotonic() - killed_s < 2
    assert '"code":"engine_unavailable"' in rest[-1]
    assert f"pid {process.pid}" in rest[-1]
    assert not any("finish_reason" in line for line in rest)
    response = api.http.get("/health/live")
    assert response.status_code == 200


def test_after_a_restart_of_the_scheduler_requests_are_served_again(
    stack: ExitStack, model_dir: Path, run_dir: Path, tokenizer: Tokenizer
) -> None:
    process = stack.enter_context(stand_in())
    first = start_fake(stack, run_dir, pid=process.pid)
    api = start_api(stack, model_dir, run_dir)
    api.wait_ready()
    first.stop()
    process.kill()
    assert api.wait_ready(503).json()["phase"] == "dead"
    response = api.http.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 503
    assert "retry-after" in response.headers
    second = start_fake(stack, run_dir, epoch=2)
    second.reply = saying([*tokenizer.encode("back", add_special_tokens=False), EOS])
    api.wait_ready()
    answer = api.http.post("/v1/chat/completions", json=CHAT).json()
    assert answer["choices"][0]["message"]["content"] == "back"
    assert len(second.submits) == 1


def test_another_epoch_in_the_heartbeats_fails_what_is_open(
    stack: ExitStack, model_dir: Path, run_dir: Path
) -> None:
    first = start_fake(stack, run_dir, epoch=1)
    api = start_api(stack, model_dir, run_dir)
    api.wait_ready()
    with httpx.stream(
        "POST", f"{api.url}/v1/chat/completions", json={**CHAT, "stream": True}, timeout=10
    ) as stream:
        first.wait_submit()
        first.stop()
        second = start_fake(stack, run_dir, epoch=2)
        rest = [line for line in stream.iter_lines() if line]
    assert '"code":"engine_unavailable"' in rest[-1]
    second.wait_for(lambda fake: len(fake.hellos) >= 1)
    api.wait_ready()
    assert second.submits == []


def test_an_api_that_the_scheduler_has_forgotten_fails_what_is_open_and_says_hello_again(
    stack: ExitStack, model_dir: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped for a while, so the scheduler gave it up; the heartbeats go on."""
    monkeypatch.setattr(link, "LOST_S", 1.0)
    fake = start_fake(stack, run_dir)
    api = start_api(stack, model_dir, run_dir)
    api.wait_ready()
    with api.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as stream:
        fake.wait_submit()
        fake.forgets = True
        assert "engine_unavailable" in stream.read().decode()
    fake.wait_for(lambda fake: len(fake.hellos) == 2)
    api.wait_ready()
    fake.reply = saying([5, EOS])
    assert api.http.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_a_refused_api_ends_with_the_reason(
    stack: ExitStack, model_dir: Path, run_dir: Path
) -> None:
    fake = start_fake(stack, run_dir)
    fake.refusal = "protocol 1 is spoken here, not 2"
    api = RunningApi(model_dir, run_dir)
    api.join()
    assert isinstance(api.error, ProtocolError)
    assert "protocol 1 is spoken here" in str(api.error)


def test_a_dead_worker_is_503_while_the_scheduler_lives(
    stack: ExitStack, model_dir: Path, run_dir: Path
) -> None:
    fake = start_fake(stack, run_dir)
    api = start_api(stack, model_dir, run_dir)
    api.wait_ready()
    fake.set_state(EngineState(Phase.DEAD, "the worker was killed by signal 9", 0, 0, 0, 0, 0, {}))
    assert "signal 9" in api.wait_ready(503).text
    assert "signal 9" in api.http.post("/v1/chat/completions", json=CHAT).text
    fake.set_state(ready())
    api.wait_ready()


def test_two_apis_at_one_scheduler_get_their_own_tokens(
    stack: ExitStack, model_dir: Path, run_dir: Path, tokenizer: Tokenizer
) -> None:
    fake = start_fake(stack, run_dir)
    apis = [start_api(stack, model_dir, run_dir) for _ in range(2)]
    for api in apis:
        api.wait_ready()
    fake.reply = lambda submit: saying(
        [*tokenizer.encode(submit.request_id, add_special_tokens=False), EOS]
    )(submit)
    for api in (*apis, *apis):
        answer = api.http.post("/v1/chat/completions", json=CHAT).json()
        assert answer["choices"][0]["message"]["content"] == f"{answer['id']}-0"
    assert len({submit.request_id for submit in fake.submits}) == 4
    assert len({hello.name for hello in fake.hellos}) == 2


def test_stopping_gives_running_streams_an_error_and_refuses_new_requests(
    stack: ExitStack, model_dir: Path, run_dir: Path
) -> None:
    fake = start_fake(stack, run_dir)
    api = start_api(stack, model_dir, run_dir)
    api.wait_ready()
    with httpx.stream(
        "POST", f"{api.url}/v1/chat/completions", json={**CHAT, "stream": True}, timeout=10
    ) as stream:
        submit = fake.wait_submit()
        started_s = time.monotonic()
        api.request_stop()
        refused = api.http.post("/v1/chat/completions", json=CHAT)
        assert refused.status_code == 503
        assert "shutting down" in refused.text
        rest = [line for line in stream.iter_lines() if line]
    assert "shutting down" in rest[-1]
    api.join()
    assert time.monotonic() - started_s < 5
    fake.wait_for(lambda fake: fake.aborts == [submit.request_id])


def test_stopping_lets_a_short_answer_finish(
    stack: ExitStack, model_dir: Path, run_dir: Path
) -> None:
    fake = start_fake(stack, run_dir)
    api = start_api(stack, model_dir, run_dir)
    api.wait_ready()
    with httpx.stream(
        "POST", f"{api.url}/v1/chat/completions", json={**CHAT, "stream": True}, timeout=10
    ) as stream:
        submit = fake.wait_submit()
        api.request_stop()
        for message in saying([EOS])(submit)[1:]:
            fake.say(message)
        rest = [line for line in stream.iter_lines() if line]
    assert rest[-1] == "data: [DONE]"
    api.join()
