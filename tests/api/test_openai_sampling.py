"""Sampling fields on their way to the engine, and bodies at random."""

from __future__ import annotations

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freetoken.api.openai_schema import ChatRequest, CompletionRequest
from tests.api.fake_scheduler import FakeScheduler, saying

USER = [{"role": "user", "content": "Hello"}]
EOS = 2
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["text", "user", "tiny"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def test_omitted_sampling_fields_are_the_engines_plain_ones(
    client: openai.OpenAI, fake: FakeScheduler
) -> None:
    fake.reply = saying([EOS])
    client.chat.completions.create(model="tiny", messages=USER)
    submit = fake.submits[0]
    assert submit.max_tokens is None
    assert submit.sampling.temperature == 1.0
    assert submit.sampling.stop_ids == (2, 0)
    assert submit.sampling.seed is None


def test_all_sampling_fields_reach_the_engine(client: openai.OpenAI, fake: FakeScheduler) -> None:
    fake.reply = saying([EOS])
    client.chat.completions.create(
        model="tiny",
        messages=USER,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"7": -100, "8": 2.5},
        max_tokens=5,
        max_completion_tokens=5,
        seed=11,
        user="somebody",
        metadata={"a": "b"},
        store=True,
        extra_body={
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "min_tokens": 3,
            "stop_token_ids": [9],
            "cache_salt": "tenant",
            "priority": 2,
        },
    )
    submit = fake.submits[0]
    assert submit.max_tokens == 5
    assert submit.cache_salt == "tenant"
    assert submit.priority == 2
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.05, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.25, -0.5)
    assert sampling.logit_bias == ((7, -100.0), (8, 2.5))
    assert (sampling.seed, sampling.min_tokens, sampling.stop_ids) == (11, 3, (9,))


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        ("/v1/chat/completions", ChatRequest, {"messages": USER}),
        ("/v1/completions", CompletionRequest, {"prompt": "Hello"}),
    ],
)
@given(data=st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_body_is_an_internal_error(
    http: httpx.Client,
    fake: FakeScheduler,
    path: str,
    kind: type[ChatRequest] | type[CompletionRequest],
    body: dict[str, object],
    data: st.DataObject,
) -> None:
    fake.reply = saying([EOS])
    names = st.sampled_from(
        [*kind.__struct_fields__, "tools", "echo", "best_of", "response_format"]
    )
    fields = data.draw(st.dictionaries(names | st.text(max_size=5), VALUES, max_size=3))
    response = http.post(path, json={**body, **fields})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code == 400:
        assert response.json()["error"]["param"] is not None
        assert response.json()["error"]["message"]
