"""Chat through the real client."""

from __future__ import annotations

import httpx
import openai
import pytest

from freetoken.api.tokenizer import Tokenizer
from freetoken.errors import ErrorCode
from freetoken.wire.messages import (
    Failed,
    FinishReason,
    Logprobs,
    Message,
    Submit,
    pack_ids,
    unpack_ids,
)
from tests.api.fake_scheduler import FakeScheduler, accept, delta, saying

USER = [{"role": "user", "content": "Hello"}]
EOS = 2


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def prompt_of(tokenizer: Tokenizer, submit: Submit) -> str:
    return tokenizer.decode(list(unpack_ids(submit.prompt_ids)), skip_special_tokens=False)


def test_chat_answers_with_text_reason_and_usage(
    client: openai.OpenAI, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    ids = ids_of(tokenizer, "Hello world, grüße 👋")
    fake.reply = saying([*ids, EOS], cached=3)
    answer = client.chat.completions.create(model="tiny", messages=USER)
    assert answer.choices[0].message.content == "Hello world, grüße 👋"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    prompt = prompt_of(tokenizer, fake.submits[0])
    assert prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert answer.usage.completion_tokens == len(ids) + 1
    assert answer.usage.prompt_tokens == len(unpack_ids(fake.submits[0].prompt_ids))
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert fake.aborts == []


def test_chat_streams_role_then_text_then_reason_then_usage(
    client: openai.OpenAI, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    ids = ids_of(tokenizer, "Hello 👋 you")
    fake.reply = saying(ids, FinishReason.LENGTH)
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=USER, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks[1:-1]]
    assert "".join(texts) == "Hello 👋 you"
    assert "\ufffd" not in "".join(texts)
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(ids)


def test_every_token_is_sent_when_it_comes(
    http: httpx.Client, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    body = {"model": "tiny", "messages": USER, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = response.iter_lines()
        submit = fake.wait_submit()
        assert "assistant" in next(lines)
        for token_id in ids_of(tokenizer, "abc"):
            assert next(lines) == ""
            fake.say(delta(submit.request_id, [token_id]))
            assert '"content":"' in next(lines)
        fake.say(delta(submit.request_id, [EOS], FinishReason.STOP))
        rest = list(lines)
    assert '"finish_reason":"stop"' in rest[1]
    assert rest[-2] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_scheduler_is_a_plain_400(
    client: openai.OpenAI, fake: FakeScheduler, stream: bool
) -> None:
    message = "prompt needs 200 tokens, the pool holds 128; raise --context-tokens"
    code = ErrorCode.CONTEXT_LENGTH_EXCEEDED
    fake.reply = lambda submit: [Failed(submit.request_id, code, message)]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=USER, stream=stream)
    assert caught.value.body == {
        "message": message,
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    assert caught.value.response.headers["content-type"] == "application/json"
    assert fake.aborts == []


@pytest.mark.parametrize(
    ("code", "status"),
    [(ErrorCode.QUEUE_FULL, 429), (ErrorCode.STEP_FAILED, 500), ("a new code", 500)],
)
def test_refusals_have_the_status_of_their_code(
    http: httpx.Client, fake: FakeScheduler, code: str, status: int
) -> None:
    fake.reply = lambda submit: [Failed(submit.request_id, code, "no", None, 7.2)]
    response = http.post("/v1/chat/completions", json={"messages": USER})
    assert response.status_code == status
    assert response.headers["retry-after"] == "8"


def test_a_step_that_fails_ends_the_stream_with_an_error_and_no_done(
    http: httpx.Client, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    body = {"messages": USER, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        request_id = fake.wait_submit().request_id
        fake.say(delta(request_id, ids_of(tokenizer, "ab")))
        fake.say(Failed(request_id, ErrorCode.STEP_FAILED, "out of memory in step 7"))
        lines = [line for line in response.iter_lines() if line]
    assert '"content":"ab"' in lines[-2]
    assert lines[-1] == (
        'data: {"error":{"message":"out of memory in step 7","type":"server_error",'
        '"param":null,"code":"step_failed"}}'
    )
    assert not any('"finish_reason":"' in line for line in lines)


def test_n_choices_have_seeds_of_their_own_and_one_prompt_count(
    client: openai.OpenAI, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    fake.reply = lambda submit: saying([*ids_of(tokenizer, submit.request_id[-1]), EOS])(submit)
    answer = client.chat.completions.create(model="tiny", messages=USER, n=3, seed=-1)
    assert [choice.message.content for choice in answer.choices] == ["0", "1", "2"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [submit.sampling.seed for submit in fake.submits] == [2**63 - 1, 0, 1]
    assert answer.usage.prompt_tokens == len(unpack_ids(fake.submits[0].prompt_ids))
    assert answer.usage.completion_tokens == 6


def test_n_choices_stream_under_their_indices(
    client: openai.OpenAI, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    fake.reply = lambda submit: saying([*ids_of(tokenizer, submit.request_id[-1]), EOS])(submit)
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(model="tiny", messages=USER, n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "0", 1: "1"}


def test_if_one_of_n_is_refused_the_others_are_aborted(
    http: httpx.Client, fake: FakeScheduler
) -> None:
    def reply(submit: Submit) -> list[Message]:
        if submit.request_id.endswith("-1"):
            return [Failed(submit.request_id, ErrorCode.QUEUE_FULL, "the queue is full")]
        return [accept(submit)]

    fake.reply = reply
    response = http.post("/v1/chat/completions", json={"messages": USER, "n": 3})
    assert response.status_code == 429
    fake.wait_for(lambda fake: len(fake.aborts) == 2)
    assert sorted(request_id[-1] for request_id in fake.aborts) == ["0", "2"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_is_cut_and_aborts_once(
    http: httpx.Client, fake: FakeScheduler, tokenizer: Tokenizer, stream: bool
) -> None:
    ids = [token for char in "one STOP two" for token in ids_of(tokenizer, char)]
    fake.reply = saying(ids, None)
    body = {"messages": USER, "stop": ["STOP", "never"], "stream": stream}
    response = http.post("/v1/chat/completions", json=body)
    assert "ST" not in response.text
    assert '"finish_reason":"stop"' in response.text
    if not stream:
        answer = response.json()
        assert answer["choices"][0]["message"]["content"] == "one "
        assert answer["usage"]["completion_tokens"] <= len(ids)
    fake.wait_for(lambda fake: len(fake.aborts) == 1)


def test_a_stop_string_that_never_completes_is_shown_at_the_end(
    client: openai.OpenAI, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    fake.reply = saying([*ids_of(tokenizer, "one STO"), EOS])
    answer = client.chat.completions.create(model="tiny", messages=USER, stop="STOP")
    assert answer.choices[0].message.content == "one STO"
    assert fake.aborts == []


def test_the_text_of_a_stop_id_is_never_shown_even_with_special_tokens(
    http: httpx.Client, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    ids = ids_of(tokenizer, "a<|im_start|>b")
    stop_id = ids_of(tokenizer, "z")[0]
    fake.reply = saying([*ids, stop_id])
    body = {"messages": USER, "skip_special_tokens": False, "stop_token_ids": [stop_id]}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == "a<|im_start|>b"
    assert fake.submits[0].sampling.stop_ids == (2, 0, stop_id)


def test_logprobs_are_those_of_the_shown_tokens(
    client: openai.OpenAI, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    ids = [*ids_of(tokenizer, "a"), *ids_of(tokenizer, "é"), EOS]
    other = ids_of(tokenizer, "b")[0]

    def reply(submit: Submit) -> list[Message]:
        values = tuple(
            Logprobs(-0.5, pack_ids([token_id, other]), (-0.5, float("-inf"))) for token_id in ids
        )
        return [accept(submit), delta(submit.request_id, ids, FinishReason.STOP, 0, values)]

    fake.reply = reply
    answer = client.chat.completions.create(
        model="tiny", messages=USER, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert fake.submits[0].sampling.logprobs == 2
    assert b"".join(bytes(token.bytes) for token in content).decode() == "aé"
    assert content[0].token == "a"
    assert content[0].logprob == -0.5
    assert [top.token for top in content[0].top_logprobs] == ["a", "b"]
    assert content[0].top_logprobs[1].logprob == -9999.0


def test_streamed_logprobs_come_with_their_text(
    client: openai.OpenAI, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    ids = [token for char in "ab é" for token in ids_of(tokenizer, char)]

    def reply(submit: Submit) -> list[Message]:
        value = (Logprobs(-1.0, b"", ()),)
        deltas = [delta(submit.request_id, [token_id], None, None, value) for token_id in ids]
        return [accept(submit), *deltas, delta(submit.request_id, [EOS], FinishReason.STOP)]

    fake.reply = reply
    raw = b""
    for chunk in client.chat.completions.create(
        model="tiny", messages=USER, logprobs=True, stream=True
    ):
        choice = chunk.choices[0]
        if choice.logprobs is not None:
            here = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
            assert here.decode() == choice.delta.content
            raw += here
    assert raw.decode() == "ab é"


def test_messages_may_be_text_parts_and_developer_becomes_system(
    client: openai.OpenAI, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    fake.reply = saying([EOS])
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    echoed = {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": []}
    client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": parts},
            echoed,
            {"role": "user", "content": "ok"},
        ],
    )
    assert prompt_of(tokenizer, fake.submits[0]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>user\nok<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_long_prompt_is_tokenised_whole(client: openai.OpenAI, fake: FakeScheduler) -> None:
    fake.reply = saying([EOS])
    text = "the quick brown fox " * 5000
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": text}]
    )
    assert answer.usage.prompt_tokens > 20_000
