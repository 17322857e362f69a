"""Routes, keys, sizes, health, models, metrics."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from pathlib import Path

import httpx
import openai
import pytest

from freetoken.api.app import build_app
from freetoken.api.http import MAX_BODY_BYTES
from freetoken.api.metrics import ENGINE_GAUGES
from freetoken.api.served import load_served
from freetoken.api.tokenizer import Tokenizer
from freetoken.scheduler.counters import GAUGES
from freetoken.wire.messages import EngineState, Phase
from tests.api.fake_scheduler import FakeScheduler, ready, saying
from tests.api.running import RunningApi

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
EOS = 2
LOADING = EngineState(Phase.LOADING, "reading shard 2 of 4", 512, 2048, 0, 0, 0, {})


def wait_phase(api: RunningApi, fake: FakeScheduler, state: EngineState) -> httpx.Response:
    fake.set_state(state)
    return api.wait_ready(200 if state.phase is Phase.READY else 503)


def test_models_report_the_effective_context(
    client: openai.OpenAI, api: RunningApi, fake: FakeScheduler
) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["tiny"]
    assert models[0].owned_by == "freetoken"
    assert models[0].created > 1_600_000_000
    assert models[0].max_model_len == 1024
    assert client.models.retrieve("tiny").id == "tiny"
    wait_phase(api, fake, LOADING)
    assert client.models.retrieve("tiny").max_model_len is None


def test_an_unknown_model_is_a_404_that_names_the_others(
    client: openai.OpenAI, fake: FakeScheduler
) -> None:
    with pytest.raises(openai.NotFoundError, match="available: tiny") as caught:
        client.chat.completions.create(model="gpt-4", **CHAT)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="available: tiny"):
        client.models.retrieve("org/other")
    assert fake.submits == []


def test_ready_tells_phase_and_bytes_while_loading_and_live_stays_200(
    http: httpx.Client, api: RunningApi, fake: FakeScheduler
) -> None:
    body = wait_phase(api, fake, LOADING).json()
    assert body["phase"] == "loading"
    assert body["detail"] == "reading shard 2 of 4"
    assert (body["loaded_bytes"], body["total_bytes"]) == (512, 2048)
    assert (body["model"], body["context_tokens"]) == ("tiny", None)
    assert http.get("/health").status_code == 503
    assert http.get("/health/live").status_code == 200
    body = wait_phase(api, fake, ready()).json()
    assert (body["status"], body["model"], body["context_tokens"]) == ("ready", "tiny", 1024)


def test_requests_while_loading_are_503_with_the_progress(
    http: httpx.Client, api: RunningApi, fake: FakeScheduler
) -> None:
    wait_phase(api, fake, LOADING)
    for stream in (False, True):
        response = http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        assert response.status_code == 503
        assert response.headers["retry-after"] == "2"
        error = response.json()["error"]
        assert error["code"] == "engine_unavailable"
        assert "reading shard 2 of 4 (512 of 2048 bytes loaded)" in error["message"]
    assert fake.submits == []


def test_a_stalled_engine_is_not_ready_and_recovers(api: RunningApi, fake: FakeScheduler) -> None:
    stalled = EngineState(Phase.STALLED, "step 7 is out for 61 s", 0, 0, 1024, 1, 0, {})
    assert wait_phase(api, fake, stalled).json()["phase"] == "stalled"
    wait_phase(api, fake, ready())


def test_unknown_paths_and_methods_have_openais_error_shape(http: httpx.Client) -> None:
    response = http.get("/v2/nothing")
    assert response.status_code == 404
    assert "/v1/chat/completions" in response.json()["error"]["message"]
    response = http.get("/v1/chat/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert http.post("/v1/models", json={}).status_code == 405
    assert http.get("/v1/models/").status_code == 404
    slashed = http.post("/v1/completions/", json={"prompt": "a"})
    assert slashed.status_code == 404  # told, not redirected
    assert "/v1/completions" in slashed.json()["error"]["message"]


def test_head_is_taken_where_get_is(http: httpx.Client) -> None:
    response = http.head("/health/live")
    assert response.status_code == 200
    assert response.content == b""


def test_a_body_beyond_the_limit_is_413_and_the_next_request_works(
    http: httpx.Client, fake: FakeScheduler
) -> None:
    fake.reply = saying([EOS])
    big = b"x" * (MAX_BODY_BYTES + 1)
    response = http.post("/v1/chat/completions", content=big)
    assert response.status_code == 413
    assert str(MAX_BODY_BYTES) in response.json()["error"]["message"]
    chunked = http.post("/v1/chat/completions", content=iter([big]))
    assert chunked.status_code == 413
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_a_refused_client_that_waits_for_our_word_is_answered_and_its_connection_closed(
    api: RunningApi, fake: FakeScheduler
) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            b"POST /nowhere HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
            b"content-length: 7\r\n\r\n"
        )
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"connection: close" in answer


class BrokenEngine:
    @property
    def state(self) -> EngineState:
        raise ZeroDivisionError("a secret")


def test_an_internal_error_is_logged_and_a_500_that_tells_nothing_and_keeps_the_connection(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = build_app(load_served(model_dir, ()), BrokenEngine(), None)

    async def get() -> httpx.Response:
        # Raises what the server would see, and cut the connection for.
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get("/health/ready")

    with caplog.at_level(logging.ERROR, "freetoken"):
        response = asyncio.run(get())
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert [record.getMessage() for record in caplog.records] == ["http.error path=/health/ready"]
    assert "a secret" in caplog.text


def test_metrics_count_requests_and_show_the_engines_counters(
    http: httpx.Client, api: RunningApi, fake: FakeScheduler
) -> None:
    fake.reply = saying([EOS])
    fake.set_state(ready(2048, {"prefix_hit_tokens": 7.0, "odd name!": 1.0, "pages_free": 3.0}))
    http.post("/v1/chat/completions", json=CHAT)
    http.get("/made/up/path")
    text = http.get("/metrics").text
    assert 'freetoken_http_requests_total{path="/v1/chat/completions",status="200"}' in text
    assert 'freetoken_http_requests_total{path="other",status="404"}' in text
    assert "made" not in text
    assert "freetoken_time_to_first_token_seconds_count" in text
    assert "freetoken_engine_prefix_hit_tokens_total 7.0" in text
    assert "freetoken_engine_odd_name__total 1.0" in text
    assert "freetoken_engine_pages_free 3.0" in text
    assert "freetoken_context_tokens 2048.0" in text


def test_the_engines_gauges_are_those_that_the_scheduler_names() -> None:
    assert set(ENGINE_GAUGES) == set(GAUGES)


def ends(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.getMessage().startswith("http.end")]


def test_one_line_is_logged_for_each_request_without_its_text(
    http: httpx.Client,
    fake: FakeScheduler,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake.reply = saying([*tokenizer.encode("quick fox", add_special_tokens=False), EOS])
    with caplog.at_level(logging.DEBUG, "freetoken"):
        body = {"messages": [{"role": "user", "content": "lazy dog"}]}
        answer = http.post("/v1/chat/completions", json=body)
        http.post("/v1/chat/completions", json=body | {"model": "other"})
        deadline_s = time.monotonic() + 10
        while len(records := ends(caplog)) < 2:  # a line may come after its answer
            assert time.monotonic() < deadline_s
    served, refused = (record.getMessage() for record in records)
    assert f"id={answer.json()['id']}" in served
    assert "status=200" in served
    assert "finish=stop" in served
    assert "ms=" in served
    assert "path=/v1/chat/completions" in refused
    assert "error=model_not_found status=404" in refused
    assert not any("quick" in record.getMessage() for record in caplog.records)
    # What the engine accepted ends with the scheduler's line.
    assert [record.levelno for record in records] == [logging.DEBUG, logging.INFO]


def test_the_request_id_is_a_header(http: httpx.Client, fake: FakeScheduler) -> None:
    fake.reply = saying([EOS])
    response = http.post("/v1/chat/completions", json=CHAT)
    assert response.headers["x-request-id"] == response.json()["id"]
    assert fake.submits[0].request_id.startswith(response.json()["id"])


def test_version_is_the_packages(http: httpx.Client) -> None:
    assert http.get("/version").json()["version"][0].isdigit()
