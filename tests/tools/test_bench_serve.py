"""bench_serve measures what a server of known speed does, whatever its dialect."""

from __future__ import annotations

import asyncio
import io
import json
import random
from dataclasses import replace
from statistics import median

import bench_serve
import pytest
from bench_report import print_tables, to_json
from bench_scenarios import Plan, Results, count_requests, measure_decode, run_plan
from exact_prompts import find_units
from openai_load import Ask, BenchError, Server, Timing
from rich.console import Console

from tests.tools.fake_openai import FakeServer

PLAN = Plan(
    lengths=(100, 200),
    extends=(1, 16),
    prefix_tokens=50,
    concurrency=(1,),
    temperatures=(0.0, 1.0),
    decode_prompt_tokens=20,
    max_tokens=30,
    repeats=3,
    seed=7,
)


def connect(fake: FakeServer, *, is_chat: bool = False, api_key: str | None = None) -> Server:
    return Server(
        "http://fake/v1/", is_chat=is_chat, api_key=api_key, transport=fake, clock=fake.clock
    )


def bench(server: Server, plan: Plan = PLAN) -> Results:
    async def run() -> Results:
        async with server:
            rng = random.Random(plan.seed)
            return await run_plan(server, plan, rng, lambda _, __: None, settle_s=0)

    return asyncio.run(run())


@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("llama_cpp", [False, True])
@pytest.mark.parametrize("overhead", [0, 13])
@pytest.mark.parametrize("letters", [False, True])
def test_a_server_of_known_speed_is_measured_exactly(
    is_chat: bool, llama_cpp: bool, overhead: int, letters: bool
) -> None:
    fake = FakeServer(overhead=overhead, letters=letters, llama_cpp=llama_cpp)
    results = bench(connect(fake, is_chat=is_chat))
    assert results.prompts.is_exact
    assert results.notes == ()
    for row in results.fresh:
        assert row.prompt_tokens == (row.tokens,) * 3
        assert row.cached_tokens == (0,) * 3
        assert row.ttft_ms == pytest.approx([row.tokens * 1.0] * 3)
    for row in results.extend:
        assert row.prompt_tokens == (50 + row.tokens,) * 3
        assert row.cached_tokens == (50,) * 3
        assert row.ttft_ms == pytest.approx([row.tokens * 1.0] * 3)
    for decode in results.decode:
        assert decode.gap_ms == pytest.approx([10.0] * 3)
        assert decode.event_p99_ms == pytest.approx([10.0] * 3)
        assert decode.tokens_per_s == pytest.approx([100.0] * 3)
        assert decode.tokens_per_event == 1


def test_no_prompt_is_sent_twice_and_no_prefix_is_shared_by_accident() -> None:
    fake = FakeServer()
    bench(connect(fake))
    assert len(set(fake.seen)) == len(fake.seen) - 1  # the two trials of optional fields are equal
    starts = [" ".join(prompt.split()[:8]) for prompt in fake.seen if len(prompt.split()) > 8]
    extends = len(PLAN.extends) * PLAN.repeats
    assert len(starts) - len(set(starts)) == extends  # each extend shares its own prefix


def test_streams_side_by_side_share_the_steps() -> None:
    fake = FakeServer()
    results = bench(connect(fake), replace(PLAN, lengths=(), extends=(), concurrency=(4,)))
    for decode in results.decode:
        assert median(decode.gap_ms) == pytest.approx(10, rel=0.1)
        assert median(decode.tokens_per_s) == pytest.approx(400, rel=0.1)


@pytest.mark.parametrize("unknown", [(), ("ignore_eos",), ("ignore_eos", "stream_options")])
def test_fields_that_the_server_refuses_are_left_out(unknown: tuple[str, ...]) -> None:
    fake = FakeServer(unknown=unknown, llama_cpp=True)
    results = bench(connect(fake))
    assert results.notes == tuple(f"the server refuses {name!r}" for name in unknown)
    measured = fake.bodies[2:]
    assert not any(name in body for name in unknown for body in measured)
    assert all(("ignore_eos" in body) == (not unknown) for body in measured)


def test_words_of_two_tokens_give_approximate_lengths_and_a_note() -> None:
    fake = FakeServer(word_tokens=2)
    results = bench(connect(fake))
    assert not results.prompts.is_exact
    assert "approximate (2.00 tokens a word)" in results.notes[0]
    assert results.fresh[0].prompt_tokens == (100,) * 3


def test_what_exceeds_the_servers_context_is_left_out_with_the_numbers() -> None:
    fake = FakeServer(max_model_len=150)
    results = bench(connect(fake))
    assert [row.tokens for row in results.fresh] == [100]
    assert [row.tokens for row in results.extend] == [1, 16]
    assert results.notes == ("left out: 200 + 1 tokens, the server's limit is 150",)


def test_what_is_shorter_than_the_template_is_left_out_with_the_numbers() -> None:
    fake = FakeServer(overhead=150)
    results = bench(connect(fake), replace(PLAN, extends=()))
    assert [row.tokens for row in results.fresh] == [200]
    assert results.notes == ("left out: 100 tokens, the shortest prompt has 151",)


def test_a_token_without_text_is_timed_by_the_end_of_its_stream() -> None:
    fake = FakeServer(silent_token=True)
    results = bench(connect(fake), replace(PLAN, concurrency=()))
    assert results.fresh[0].ttft_ms == pytest.approx([100.0] * 3)


def test_the_key_is_sent_as_a_bearer_token() -> None:
    fake = FakeServer()
    bench(connect(fake, api_key="secret"))
    assert fake.api_keys == {"Bearer secret"}


def test_temperature_and_top_p_are_always_sent() -> None:
    fake = FakeServer()
    bench(connect(fake), replace(PLAN, lengths=(), extends=()))
    assert {body["temperature"] for body in fake.bodies} == {0.0, 1.0}
    assert {body["top_p"] for body in fake.bodies} == {1.0}


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        (FakeServer(fail_with=(401, "no key")), "HTTP 401 from http://fake/v1/completions: no key"),
        (FakeServer(break_off=True), "broke off: ReadError"),
    ],
)
def test_a_failing_server_ends_the_benchmark_with_its_reason(
    fake: FakeServer, message: str
) -> None:
    with pytest.raises(BenchError, match=message):
        bench(connect(fake))


def test_events_that_hold_several_tokens_count_as_tokens() -> None:
    timing = Timing(0.0, tuple(0.1 * event for event in range(11)), 5, 22, None)
    gap_ms, p50_ms, _, tokens_per_s, per_event = measure_decode([timing])
    assert (gap_ms, p50_ms) == pytest.approx((50.0, 100.0))
    assert tokens_per_s == pytest.approx(20.0)
    assert per_event == 2


def test_streams_that_do_not_overlap_are_refused() -> None:
    early = Timing(0.0, (1.0, 2.0, 3.0), 5, 3, None)
    late = Timing(0.0, (4.0, 5.0, 6.0), 5, 3, None)
    with pytest.raises(BenchError, match="hardly overlap"):
        measure_decode([early, late])


def test_progress_counts_every_request_of_the_plan() -> None:
    fake = FakeServer()
    done: list[int] = []

    async def run() -> None:
        async with connect(fake) as server:
            await run_plan(
                server, PLAN, random.Random(1), lambda _, requests: done.append(requests)
            )

    asyncio.run(run())
    assert sum(done) == count_requests(PLAN) == 24


def test_tables_and_json_hold_the_medians() -> None:
    results = bench(connect(FakeServer()))
    text = io.StringIO()
    print_tables(results, Console(file=text, width=100))
    assert "Extends of 50 cached tokens" in text.getvalue()
    assert [line.split() for line in text.getvalue().splitlines() if line.strip()][5] == (
        ["200", "200", "0", "200", "200", "200"]
    )
    data = json.loads(json.dumps(to_json(results)))
    assert data["fresh"][1]["median"]["ttft_ms"] == pytest.approx(200)
    assert data["decode"][0]["median"]["tokens_per_s"] == pytest.approx(100)
    assert data["plan"]["seed"] == 7


def test_what_the_engine_tells_stands_beside_each_figure() -> None:
    results = bench(connect(FakeServer(tells_experts=True)))
    for row in (*results.fresh, *results.extend):
        assert [work.slot_misses for work in row.work] == [3] * 3
        assert [work.distinct_experts for work in row.work] == [10] * 3
    for decode in results.decode:
        assert [work.steps for work in decode.work] == [PLAN.max_tokens] * 3
        assert [work.miss_rate for work in decode.work] == pytest.approx([0.3] * 3)
    text = io.StringIO()
    print_tables(results, Console(file=text, width=120))
    lines = [line.split() for line in text.getvalue().splitlines() if line.strip()]
    assert lines[2][-4:] == ["path", "distinct", "misses", "MB"]
    assert lines[4][-5:] == ["on", "demand", "10", "3", "2.1e-05"]
    assert lines[-1][-3:] == ["10", "3", "30.0"]
    data = json.loads(json.dumps(to_json(results)))
    assert data["decode"][0]["median"]["work"]["slot_misses"] == 3 * PLAN.max_tokens


def test_a_server_that_tells_nothing_gets_no_further_columns_or_requests() -> None:
    fake = FakeServer()
    results = bench(connect(fake))
    assert not any(row.work for row in (*results.fresh, *results.extend, *results.decode))
    text = io.StringIO()
    print_tables(results, Console(file=text, width=120))
    assert "misses" not in text.getvalue()


def test_a_server_that_is_not_there_gives_one_line_and_exit_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench_serve.main(["--url", "http://127.0.0.1:9"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("bench_serve: error: http://127.0.0.1:9 does not answer")


def test_units_are_measured_not_assumed() -> None:
    async def count(prompt: str) -> int:
        return 3 * len(prompt) + 2

    maker = asyncio.run(find_units(count, random.Random(0)))
    assert not maker.is_exact
    assert maker.tokens_per_unit > 3


def test_the_first_token_time_is_the_first_events() -> None:
    fake = FakeServer()

    async def run() -> Timing:
        async with connect(fake, is_chat=True) as server:
            return await server.stream(" a b c", Ask(max_tokens=3))

    timing = asyncio.run(run())
    assert timing.ttft_ms == pytest.approx(3.0)
    assert len(timing.events_s) == timing.completion_tokens == 3
