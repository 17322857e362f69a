"""What clients see of capacity: refusals, waiting, tenants, priorities; through HTTP to a scripted
worker and back."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.api.tiny_model import byte_level_tokenizer, write_model
from tests.fakes.worker import WorkerScript
from tests.whole.serving import VOCAB, Serving, body_of, serving

N = 128
SALTS = ["tenant-a", "tenant-b"]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny-model", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def small(model_dir: Path) -> Iterator[Serving]:
    """128 tokens in eight pages, two rows."""
    script = WorkerScript(
        num_pages=8, max_rows=2, vocab_size=VOCAB, step_ms=2, context_flag="--num-pages"
    )
    with serving(model_dir, script) as found:
        yield found


def chat_of(num_tokens: int, **fields: object) -> dict[str, object]:
    """A chat request whose prompt has `num_tokens` tokens."""
    frame = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    encode = byte_level_tokenizer().encode
    text = "Q" * (num_tokens - len(encode(frame.format("")).ids))
    assert len(encode(frame.format(text)).ids) == num_tokens
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_prompt_beyond_the_context_is_a_400_at_once_beside_one_that_runs(
    small: Serving, path: str, stream: bool
) -> None:
    body = body_of([5] * 200) if path == "/v1/completions" else chat_of(200)
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(small.complete, [1, 2, 3], 100)
        begun_s = time.monotonic()
        response = small.http.post(path, json={**body, "stream": stream})
        assert time.monotonic() - begun_s < 1.0
        assert response.status_code == 400
        assert response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["type"] == "invalid_request_error"
        assert error["message"] == (
            "prompt needs 200 tokens (13 pages of 16), the pool holds 128 (8); "
            "raise --num-pages or shorten the prompt"
        )
        assert beside.result()["usage"]["completion_tokens"] == 100
    small.control()


@pytest.mark.parametrize("length", [N - 2, N - 1, N, N + 1])
@pytest.mark.parametrize("max_tokens", [None, 1, 2, 3])
def test_at_the_edge_of_the_context_the_answer_comes_within_two_seconds(
    small: Serving, length: int, max_tokens: int | None
) -> None:
    begun_s = time.monotonic()
    response = small.post([7] * length, max_tokens)
    assert time.monotonic() - begun_s < 2.0
    if length < N:
        answer = response.json()
        assert answer["usage"]["completion_tokens"] == min(max_tokens or N, N - length)
        assert answer["choices"][0]["finish_reason"] == "length"
    else:
        assert response.status_code == 400
        assert f"{length} tokens" in response.json()["error"]["message"]
    small.control()


def test_models_and_the_refusal_agree_on_the_context(small: Serving) -> None:
    context = small.http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert context == N
    assert f"the pool holds {context} " in small.post([1] * 300).json()["error"]["message"]


def test_a_full_queue_is_a_429_with_retry_after_and_drains(model_dir: Path) -> None:
    script = WorkerScript(max_rows=1, vocab_size=VOCAB, step_ms=5)
    with serving(model_dir, script, max_queued=(2, 10**6)) as there, ThreadPoolExecutor(8) as pool:
        bodies = [body_of([1 + i], 60) for i in range(8)]
        answers = list(pool.map(lambda b: there.http.post("/v1/completions", json=b), bodies))
        codes = sorted(answer.status_code for answer in answers)
        assert codes.count(200) >= 2
        refused = [answer for answer in answers if answer.status_code == 429]
        assert len(refused) == 8 - codes.count(200) > 0
        for answer in refused:
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            error = answer.json()["error"]
            assert error["code"] == "queue_full"
            assert "the limit is 2" in error["message"]
            assert "--max-queued-requests" in error["message"]
        there.control()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_cache_salt_keeps_prefixes_among_its_own(model_dir: Path, path: str) -> None:
    script = WorkerScript(vocab_size=VOCAB, num_pages=64)
    with serving(model_dir, script) as there:

        def cached(**fields: object) -> int:
            body = body_of([9] * 100) if path == "/v1/completions" else chat_of(100, max_tokens=4)
            response = there.http.post(path, json={**body, **fields})
            assert response.status_code == 200, response.text
            return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached() == 0
        assert cached() == 99
        for salt in SALTS:
            assert cached(cache_salt=salt) == 0
            assert cached(cache_salt=salt) == 99
        assert cached() == 99
        there.control()


def test_a_lower_priority_value_is_served_first(model_dir: Path) -> None:
    """Those who wait for the one row; vLLM's meaning of the field."""
    script = WorkerScript(max_rows=1, vocab_size=VOCAB, step_ms=4)
    with serving(model_dir, script) as there, ThreadPoolExecutor(4) as pool:
        done: list[int] = []

        def ask(priority: int, max_tokens: int) -> None:
            there.complete([2, 2], max_tokens, priority=priority)
            done.append(priority)

        asked = [pool.submit(ask, 0, 100)]
        await_counter(there, "running", 1)
        for waiting, priority in enumerate((3, -2, 1), 1):
            asked.append(pool.submit(ask, priority, 2))
            await_counter(there, "waiting", waiting)
        for future in asked:
            future.result()
        assert done == [0, -2, 1, 3]
        there.control()


def await_counter(there: Serving, name: str, value: float) -> None:
    deadline_s = time.monotonic() + 5
    while there.counters()[name] != value:
        assert time.monotonic() < deadline_s, there.counters()


def test_who_leaves_at_any_moment_takes_everything_along(model_dir: Path) -> None:
    """Queued, between chunks, while decoding, at the finish; streaming and not; at random."""
    rng = random.Random(3)
    script = WorkerScript(
        num_pages=48, page_size=4, max_rows=4, max_step_tokens=16, vocab_size=VOCAB, step_ms=0.5
    )
    prompt = [11 + i for i in range(90)]
    with serving(model_dir, script) as there:
        undisturbed = there.complete([*prompt, 5], 8)["choices"][0]["text"]

        def leave(moment_s: float, length: int, max_tokens: int, stream: bool) -> None:
            body = body_of(prompt[:length], max_tokens, stream=stream)
            try:
                there.http.post("/v1/completions", json=body, timeout=moment_s)
            except httpx.TimeoutException:
                return

        with ThreadPoolExecutor(12) as pool:
            for _ in range(200):
                pool.submit(
                    leave,
                    rng.choice([0.001, 0.005, 0.02, 0.08]),
                    rng.randint(1, 90),
                    rng.choice([1, 4, 40]),
                    rng.random() < 0.5,
                )
        there.control()
        counters = there.counters()
        assert counters["requests_aborted"] > 0
        ended = ("requests_finished", "requests_aborted", "requests_failed")
        assert sum(counters[name] for name in ended) == counters["requests"]
        assert counters["requests_failed"] == 0
        follow_up = there.complete([*prompt, 5], 8)
        assert follow_up["choices"][0]["text"] == undisturbed


def test_a_preempted_stream_pauses_and_has_the_text_of_an_undisturbed_one(
    model_dir: Path,
) -> None:
    """Two that want nearly the whole pool each; the second has to make room for the first."""
    script = WorkerScript(num_pages=40, page_size=4, max_rows=3, vocab_size=VOCAB, step_ms=0.5)
    with serving(model_dir, script) as there:
        expected = [there.complete([number], 120)["choices"][0]["text"] for number in (21, 22)]
        for i in range(30):
            there.complete([30 + i], 1)  # outputs are short, it learns
        texts = ["", ""]
        events = [0, 0]

        def read(index: int) -> None:
            body = body_of([21 + index], 120, stream=True, cache_salt=f"again-{index}")
            with there.http.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                        texts[index] += choice["text"]
                        events[index] += 1

        readers = [threading.Thread(target=read, args=(index,)) for index in range(2)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        assert there.counters()["preemptions"] > 0
        assert texts == expected
        there.control()


def test_the_next_turn_reuses_up_to_the_last_common_token(
    tmp_path: Path,
) -> None:
    """The template adds an opener only where an answer begins: the next turn goes without it."""
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    model_dir = write_model(tmp_path / "opener", template=template, vocab_size=VOCAB)
    encode = byte_level_tokenizer().encode
    reply = "fine"
    script = WorkerScript(
        vocab_size=VOCAB, page_size=16, num_pages=64, reply=(*encode(reply).ids, 2)
    )
    turns = [{"role": "user", "content": "How are you today? " * 5}]
    with serving(model_dir, script) as there:

        def ask() -> dict[str, object]:
            response = there.http.post("/v1/chat/completions", json={"messages": turns})
            assert response.status_code == 200, response.text
            found: dict[str, object] = response.json()
            return found

        first = ask()
        history = f"<|im_start|>user\n{turns[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
        turns += [
            {"role": "assistant", "content": reply},
            {"role": "user", "content": "And now?"},
        ]
        second = ask()
        assert first["choices"][0]["message"]["content"] == reply  # type: ignore[index]
        usage = second["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == len(encode(history).ids)  # type: ignore[index]
        there.control()
