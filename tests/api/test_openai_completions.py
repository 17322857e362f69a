"""Completions through the real client."""

from __future__ import annotations

import httpx
import openai
import pytest

from freetoken.api.tokenizer import Tokenizer
from freetoken.wire.messages import FinishReason, Logprobs, Message, Submit, pack_ids, unpack_ids
from tests.api.fake_scheduler import FakeScheduler, accept, delta, saying

EOS = 2


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_a_text_prompt_is_continued(
    client: openai.OpenAI, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    fake.reply = saying(ids_of(tokenizer, " world"), FinishReason.LENGTH, cached=1)
    answer = client.completions.create(model="tiny", prompt="Hello", max_tokens=6)
    assert answer.choices[0].text == " world"
    assert answer.choices[0].finish_reason == "length"
    assert list(unpack_ids(fake.submits[0].prompt_ids)) == ids_of(tokenizer, "Hello")
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        (["a", "bb"], None),
    ],
)
def test_prompts_come_in_four_forms(
    client: openai.OpenAI,
    fake: FakeScheduler,
    tokenizer: Tokenizer,
    prompt: list[object],
    expected: list[list[int]] | None,
) -> None:
    fake.reply = lambda submit: saying([*ids_of(tokenizer, submit.request_id[-1]), EOS])(submit)
    answer = client.completions.create(model="tiny", prompt=prompt, n=2)
    if expected is None:
        expected = [ids_of(tokenizer, str(text)) for text in prompt]
    got = [list(unpack_ids(submit.prompt_ids)) for submit in fake.submits]
    assert got == [ids for ids in expected for _ in range(2)]
    assert [choice.text for choice in answer.choices] == [str(n) for n in range(2 * len(expected))]
    assert answer.usage.prompt_tokens == sum(len(ids) for ids in expected)


def test_completions_stream_text_and_usage(
    client: openai.OpenAI, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    fake.reply = saying([*ids_of(tokenizer, " 世界 %d"), EOS])
    chunks = list(
        client.completions.create(
            model="tiny", prompt="Hello", stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == " 世界 %d"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + len(
        [*ids_of(tokenizer, " 世界 %d"), EOS]
    )


def test_completion_logprobs_name_half_characters_and_offsets(
    client: openai.OpenAI, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    ids = [*ids_of(tokenizer, "a"), *ids_of(tokenizer, "é"), *ids_of(tokenizer, "b")]

    def reply(submit: Submit) -> list[Message]:
        values = tuple(Logprobs(-0.25, pack_ids([ids[0]]), (-0.125,)) for _ in ids)
        return [accept(submit), delta(submit.request_id, ids, FinishReason.LENGTH, 0, values)]

    fake.reply = reply
    logprobs = client.completions.create(model="tiny", prompt="x", logprobs=1).choices[0].logprobs
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.token_logprobs == [-0.25] * 4
    assert logprobs.top_logprobs[3] == {"a": -0.125, "b": -0.25}


def test_logprobs_of_a_cut_text_end_where_it_does(
    http: httpx.Client, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    ids = [token for char in "one STOP two" for token in ids_of(tokenizer, char)]

    def reply(submit: Submit) -> list[Message]:
        value = (Logprobs(-1.0, b"", ()),)
        deltas = [delta(submit.request_id, [token_id], None, None, value) for token_id in ids]
        return [accept(submit), *deltas]

    fake.reply = reply
    body = {"prompt": "x", "logprobs": 0, "stop": "STOP"}
    choice = http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["text"] == "one "
    assert "".join(choice["logprobs"]["tokens"]) == "one "


def test_the_stop_string_may_be_included(
    http: httpx.Client, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    fake.reply = saying(ids_of(tokenizer, "one STOP two"), None)
    body = {"prompt": "x", "stop": "STOP", "include_stop_str_in_output": True}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "one STOP"


def test_stop_strings_count_only_after_min_tokens(
    http: httpx.Client, fake: FakeScheduler, tokenizer: Tokenizer
) -> None:
    ids = [token for char in "a.b.c." for token in ids_of(tokenizer, char)]
    fake.reply = saying(ids, None)
    body = {"prompt": "x", "stop": ".", "min_tokens": 3}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "a.b"


@pytest.mark.parametrize("prompt", ["", [], [[]], [1, "a"], 7, {"a": 1}, [[1], "a"], [True]])
def test_prompts_that_are_none_are_refused(
    http: httpx.Client, fake: FakeScheduler, prompt: object
) -> None:
    response = http.post("/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"
    assert fake.submits == []


def test_token_ids_outside_the_vocabulary_are_refused_with_the_limit(
    http: httpx.Client, tokenizer: Tokenizer
) -> None:
    for token_id in (-1, tokenizer.vocab_size, 2**40):
        response = http.post("/v1/completions", json={"prompt": [5, token_id]})
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert str(token_id) in message
        assert str(tokenizer.vocab_size - 1) in message


@pytest.mark.parametrize(
    ("prompt", "n", "limit"), [([[1]] * 129, 8, "1024"), ([1] * (1 << 17) + [1], 128, "16777216")]
)
def test_a_request_that_multiplies_beyond_measure_is_refused_before_the_engine_sees_it(
    http: httpx.Client, fake: FakeScheduler, prompt: list[object], n: int, limit: str
) -> None:
    response = http.post("/v1/completions", json={"prompt": prompt, "n": n})
    assert response.status_code == 400
    assert limit in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "n"
    assert fake.submits == []
