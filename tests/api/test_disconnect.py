"""Clients that leave: one abort, at once, and nothing left open."""

from __future__ import annotations

import json
import logging
import random
import socket

import httpx
import pytest

from freetoken.api.tokenizer import Tokenizer
from freetoken.wire.messages import FinishReason, Message, Submit
from tests.api.fake_scheduler import FakeScheduler, accept, accept_only, delta, saying
from tests.api.running import RunningApi

EOS = 2


def post_raw(api: RunningApi, body: dict[str, object]) -> socket.socket:
    """A request on a socket of our own."""
    host, port = api.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    payload = json.dumps({"messages": [{"role": "user", "content": "Hello"}], **body}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(payload)}\r\n"
    connection.sendall(head.encode() + b"\r\n" + payload)
    return connection


def check_still_serving(http: httpx.Client, fake: FakeScheduler, tokenizer: Tokenizer) -> None:
    fake.reply = saying([*tokenizer.encode("ok", add_special_tokens=False), EOS])
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": ""}]})
    assert answer.json()["choices"][0]["message"]["content"] == "ok"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["before it is accepted", "before a token", "after a token"])
def test_leaving_aborts_each_sequence_once_and_is_no_error(
    api: RunningApi,
    fake: FakeScheduler,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
    when: str,
) -> None:
    fake.reply = (lambda submit: []) if when == "before it is accepted" else accept_only
    connection = post_raw(api, {"stream": stream, "n": 2})
    submit = fake.wait_submit(1)
    if when == "after a token":
        fake.say(delta(submit.request_id, tokenizer.encode("a", add_special_tokens=False)))
        if stream:
            received = b""
            while b'"content":"a"' not in received:
                received += connection.recv(65536)
    connection.close()
    fake.wait_for(lambda fake: len(fake.aborts) == 2)
    assert sorted(fake.aborts) == sorted(submit.request_id for submit in fake.submits)
    check_still_serving(api.http, fake, tokenizer)
    assert len(fake.aborts) == 2
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_two_hundred_departures_at_random_leave_nothing_open(
    api: RunningApi, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    rng = random.Random(7)
    ids = tokenizer.encode("abc", add_special_tokens=False)

    def reply(submit: Submit) -> list[Message]:
        messages: list[Message] = [accept(submit), delta(submit.request_id, ids)]
        if rng.random() < 0.5:
            messages.append(delta(submit.request_id, [EOS], FinishReason.STOP))
        return messages[: rng.randint(0, 3)]

    fake.reply = reply
    for _ in range(200):
        connection = post_raw(api, {"stream": rng.random() < 0.5})
        if rng.random() < 0.3:
            fake.wait_submit(len(fake.submits) - 1 if fake.submits else 0)
        if rng.random() < 0.3:
            connection.shutdown(socket.SHUT_WR)
        connection.close()
    httpx.get(f"{api.url}/health/live", verify=False)  # accepted after all of them
    api.wait_idle()
    assert len(set(fake.aborts)) == len(fake.aborts)
    check_still_serving(api.http, fake, tokenizer)


def test_a_late_end_after_a_stop_string_is_swallowed(
    api: RunningApi, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    fake.reply = saying(tokenizer.encode("a.b", add_special_tokens=False), None)
    body = {"messages": [{"role": "user", "content": "x"}], "stop": "."}
    answer = api.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "a"
    request_id = fake.submits[0].request_id
    fake.wait_for(lambda fake: request_id in fake.aborts)
    fake.say(delta(request_id, [EOS], FinishReason.STOP))
    fake.say(delta("never heard of", [EOS], FinishReason.STOP), request_id)
    check_still_serving(api.http, fake, tokenizer)


def test_frames_that_are_no_message_are_counted_and_dropped(
    api: RunningApi, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    for frame in (b"", b"\xc1", b"\x93\x01\x02\x03", b"x" * 1000):
        fake.say(frame)
    check_still_serving(api.http, fake, tokenizer)
    assert "freetoken_malformed_frames 4.0" in api.http.get("/metrics").text


def test_a_client_that_leaves_while_it_sends_its_body_is_no_trouble(
    api: RunningApi, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    host, port = api.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{"
    )
    connection.close()
    check_still_serving(api.http, fake, tokenizer)
    assert 'path="/v1/chat/completions",status="499"' in api.http.get("/metrics").text
