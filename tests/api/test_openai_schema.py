"""Refusals: every one a 400 in OpenAI's shape that names the field; nothing reaches the engine."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.api.fake_scheduler import FakeScheduler, saying

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}
TEXT = {"model": "tiny", "prompt": "Hello"}
TOOL = {"type": "function", "function": {"name": "f"}}
EOS = 2

BOTH = [
    ("temperature", -0.1),
    ("temperature", 2.5),
    ("temperature", "hot"),
    ("top_p", 1.5),
    ("min_p", -1),
    ("top_k", -2),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-38),
    ("n", 0),
    ("n", 1000),
    ("seed", 2**63),
    ("seed", 1.5),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", True),
    ("max_tokens", 2**70),
    ("min_tokens", -1),
    ("stop", 7),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 100),
    ("stop", "x" * 2000),
    ("stop_token_ids", [10**6]),
    ("logit_bias", {"1000000": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {"1": 101}),
    ("logit_bias", [1]),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("cache_salt", ""),
    ("guided_json", {"type": "object"}),
    ("structured_outputs", {}),
    ("max_token", 5),
]
CHAT_ONLY = [
    ("tools", [TOOL]),
    ("tool_choice", "auto"),
    ("functions", [{"name": "f"}]),
    ("function_call", "auto"),
    ("response_format", {"type": "json_object"}),
    ("modalities", ["text", "audio"]),
    ("audio", {"voice": "alloy"}),
    ("prediction", {"type": "content", "content": "x"}),
    ("reasoning_effort", "high"),
    ("verbosity", "low"),
    ("web_search_options", {}),
    ("logprobs", 3),
    ("top_logprobs", 21),
    ("top_logprobs", 3),
    ("max_completion_tokens", 0),
    ("chat_template_kwargs", {"messages": []}),
    ("messages", []),
    ("messages", "Hello"),
    ("prompt", "Hello"),
]
COMPLETIONS_ONLY = [
    ("best_of", 3),
    ("suffix", "end"),
    ("echo", True),
    ("logprobs", 21),
    ("logprobs", True),
    ("max_completion_tokens", 5),
    ("messages", []),
]


@pytest.mark.parametrize(("field", "value"), BOTH + CHAT_ONLY)
def test_chat_refuses_the_field_by_name(
    http: httpx.Client, fake: FakeScheduler, field: str, value: object
) -> None:
    check_refused(http, fake, "/v1/chat/completions", {**CHAT, field: value}, field)


@pytest.mark.parametrize(("field", "value"), BOTH + COMPLETIONS_ONLY)
def test_completions_refuse_the_field_by_name(
    http: httpx.Client, fake: FakeScheduler, field: str, value: object
) -> None:
    check_refused(http, fake, "/v1/completions", {**TEXT, field: value}, field)


def check_refused(
    http: httpx.Client, fake: FakeScheduler, path: str, body: dict[str, object], field: str
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert field in error["message"]
    assert error["param"].startswith(field)
    assert fake.submits == []


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {}, "store": False, "service_tier": "auto"},
        {"safety_identifier": "s", "prompt_cache_key": "k"},
        {"tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"response_format": {"type": "text"}, "modalities": ["text"]},
        {"tools": None, "audio": None, "stop": None, "n": None, "logit_bias": None, "new": None},
        {"top_p": 0, "top_k": -1, "stop": [], "logit_bias": {}},
        {"temperature": 0, "top_p": 1, "logprobs": False, "top_logprobs": 0},
    ],
)
def test_harmless_and_neutral_fields_are_taken(
    http: httpx.Client, fake: FakeScheduler, fields: dict[str, object]
) -> None:
    fake.reply = saying([EOS])
    response = http.post("/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 200, response.text


def test_best_of_n_and_no_suffix_are_neutral(http: httpx.Client, fake: FakeScheduler) -> None:
    fake.reply = saying([EOS])
    body = {**TEXT, "best_of": 2, "n": 2, "suffix": "", "echo": False}
    assert http.post("/v1/completions", json=body).status_code == 200


def test_top_p_zero_means_the_likeliest_token(http: httpx.Client, fake: FakeScheduler) -> None:
    fake.reply = saying([EOS])
    http.post("/v1/chat/completions", json={**CHAT, "top_p": 0})
    assert fake.submits[0].sampling.top_k == 1


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 7}, "messages[0].content"),
        ({"role": "robot", "content": "x"}, "messages[0]"),
        ({"content": "x"}, "messages[0]"),
        ("hello", "messages[0]"),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[0].role"),
        ({"role": "assistant", "content": "", "tool_calls": [TOOL]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "mood": "bad"}, "messages[0].mood"),
        ({"role": "user", "content": "x", "name": 7}, "messages[0].name"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_messages_are_refused_with_their_place(
    http: httpx.Client, fake: FakeScheduler, message: object, param: str
) -> None:
    response = http.post("/v1/chat/completions", json={"messages": [message]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert fake.submits == []


def test_image_parts_are_refused_by_name(http: httpx.Client) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    response = http.post("/v1/chat/completions", json=body)
    assert "image_url" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b"[]",
        b'"text"',
        b'{"messages": [',
        b'{"temperature": NaN, "messages": []}',
        b'{"temperature": Infinity, "messages": []}',
        b'{"temperature": 1e999, "messages": []}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 100_000,
    ],
)
def test_bodies_that_are_no_json_object_are_clean_400s(
    http: httpx.Client, fake: FakeScheduler, body: bytes
) -> None:
    response = http.post("/v1/chat/completions", content=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "invalid_json"
    assert fake.submits == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b" ", "the body is empty; send a JSON object"),
        (b"[1]", "the body must be an object, not an array"),
        (b"null", "the body must be an object, not null"),
        (b'{"messages": [1]}', "messages[0] must be an object, not a number"),
        (
            b'{"messages": [{"role": "user", "content": {}}]}',
            "messages[0].content is an object, must be text or a list of text parts",
        ),
        (
            b'{"messages": [{"role": "user", "content": "a", "name": true}]}',
            "messages[0].name must be text, not a boolean",
        ),
    ],
)
def test_what_came_is_named_as_json_names_it(http: httpx.Client, body: bytes, message: str) -> None:
    response = http.post("/v1/chat/completions", content=body)
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)


def test_messages_give_value_and_limit(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json={**CHAT, "temperature": 7.5})
    assert response.json()["error"]["message"] == "temperature: expected `float` <= 2.0, got 7.5"
    response = http.post("/v1/chat/completions", json={**CHAT, "max_token": 7})
    assert response.json()["error"]["message"] == (
        "the field 'max_token' is not supported; did you mean max_tokens?"
    )


def test_two_lengths_that_differ_are_refused_by_name(
    http: httpx.Client, fake: FakeScheduler
) -> None:
    body = {**CHAT, "max_tokens": 9, "max_completion_tokens": 5}
    check_refused(http, fake, "/v1/chat/completions", body, "max_tokens")
    message = http.post("/v1/chat/completions", json=body).json()["error"]["message"]
    assert message == "max_tokens=9 and max_completion_tokens=5 contradict each other; send one"


def test_a_missing_field_is_named(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json={"model": "tiny"})
    assert response.json()["error"]["message"] == "the field messages is required"
    assert response.json()["error"]["param"] == "messages"


def test_nesting_within_a_field_is_no_trouble(http: httpx.Client) -> None:
    deep: object = 1
    for _ in range(500):
        deep = [deep]
    body = json.dumps({**CHAT, "chat_template_kwargs": {"deep": deep}, "logit_bias": deep})
    assert http.post("/v1/chat/completions", content=body).status_code == 400
