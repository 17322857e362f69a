"""A base model: no chat template, defaults of its own, a vocabulary larger than its tokenizer's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.fake_scheduler import FakeScheduler, saying
from tests.api.running import RunningApi
from tests.api.tiny_model import write_model

EOS = 2
GENERATION = {
    "temperature": 0.2,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "eos_token_id": [0, 999],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeScheduler, RunningApi]]:
    path = tmp_path_factory.mktemp("base") / "base"
    model = write_model(path, template=None, generation=GENERATION, vocab_size=500)
    with tempfile.TemporaryDirectory(prefix="ft") as run_dir:
        fake = FakeScheduler(Path(run_dir))
        fake.reply = saying([EOS])
        api = RunningApi(model, Path(run_dir))
        api.wait_ready()
        yield fake, api
        api.stop()
        fake.stop()


def test_chat_without_a_template_is_a_400_that_shows_the_way(
    base: tuple[FakeScheduler, RunningApi],
) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}]}
    response = base[1].http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "/v1/completions" in response.json()["error"]["message"]


def test_omitted_fields_take_the_models_values_and_given_ones_win(
    base: tuple[FakeScheduler, RunningApi],
) -> None:
    fake, api = base
    for fields in ({}, {"temperature": 1.0, "top_k": -1, "repetition_penalty": 1}):
        assert api.http.post("/v1/completions", json={"prompt": "a", **fields}).is_success
    omitted, given = (submit.sampling for submit in fake.submits[-2:])
    assert (omitted.temperature, omitted.top_p, omitted.top_k) == (0.2, 0.9, 20)
    assert (omitted.min_p, omitted.repetition_penalty) == (0.05, 1.1)
    assert (given.temperature, given.top_p, given.top_k) == (1.0, 0.9, 0)
    assert given.repetition_penalty == 1.0


def test_ends_outside_the_vocabulary_are_left_out(base: tuple[FakeScheduler, RunningApi]) -> None:
    fake, api = base
    api.http.post("/v1/completions", json={"prompt": "a"})
    assert fake.submits[-1].sampling.stop_ids == (0, 2)


def test_ids_that_only_the_model_knows_may_be_sent_and_sampled(
    base: tuple[FakeScheduler, RunningApi],
) -> None:
    fake, api = base
    fake.reply = saying([499, EOS])
    answer = api.http.post("/v1/completions", json={"prompt": [499], "logit_bias": {"499": 1}})
    assert answer.json()["choices"][0]["text"] == ""
