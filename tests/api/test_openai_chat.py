"""Chat through the real client."""

from __future__ import annotations

import openai
import pytest

from freetoken.api.tokenizer import Tokenizer
from freetoken.errors import ErrorCode
from freetoken.wire.messages import Failed, FinishReason, unpack_ids
from tests.api.fake_scheduler import FakeScheduler, saying

USER = [{"role": "user", "content": "Hello"}]
EOS = 2


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_chat_answers_with_text_reason_and_usage(
    client: openai.OpenAI, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    ids = ids_of(tokenizer, "Hello world, grüße 👋")
    fake.reply = saying([*ids, EOS], cached=3)
    answer = client.chat.completions.create(model="tiny", messages=USER)
    assert answer.choices[0].message.content == "Hello world, grüße 👋"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    prompt = tokenizer.decode(
        list(unpack_ids(fake.submits[0].prompt_ids)), skip_special_tokens=False
    )
    assert prompt == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert answer.usage.completion_tokens == len(ids) + 1
    assert answer.usage.prompt_tokens == len(unpack_ids(fake.submits[0].prompt_ids))
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


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
    assert len([text for text in texts if text]) > 2
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_scheduler_is_a_plain_400(
    client: openai.OpenAI, fake: FakeScheduler, stream: bool
) -> None:
    message = "prompt needs 200 tokens, the pool holds 128; raise --context-tokens"
    code = ErrorCode.CONTEXT_LENGTH_EXCEEDED
    fake.reply = lambda submit: [Failed(submit.request_id, code, message, "messages")]
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
