"""The scheduler with the fake model: whole requests, and what the plans were."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest

from freetoken.wire.messages import (
    Accepted,
    Failed,
    FinishReason,
    StepMode,
    Submit,
    pack_ids,
    unpack_ids,
)
from tests.scheduler.drive import LONG, count_extended, expect, sampling, small

# ---------------------------------------------------------------- text and ends


def test_a_request_gets_the_text_of_an_undisturbed_run() -> None:
    driver = small(max_step_tokens=5)
    answer = driver.submit("a", LONG, max_tokens=9)
    assert answer == Accepted("a", 100, 9)
    driver.run()
    assert driver.text("a") == expect(LONG, 9)
    assert driver.finish("a") == "length"
    assert [len(e.token_ids) // 4 for p in driver.plans for e in p.extends] == [5] * 20


def test_a_stop_id_ends_with_stop_and_is_the_last_id() -> None:
    stop = expect(LONG, 9)[3]
    driver = small()
    driver.submit("a", LONG, max_tokens=9, stop_ids=(stop,))
    driver.run()
    assert driver.text("a") == expect(LONG, 9)[: expect(LONG, 9).index(stop) + 1]
    assert driver.finish("a") == "stop"


def test_what_is_in_flight_when_a_row_stops_is_dropped() -> None:
    stop = expect([5, 6], 9)[0]
    driver = small()
    driver.submit("a", [5, 6], max_tokens=9, stop_ids=(stop,))
    driver.plan()
    driver.plan()
    assert unpack_ids(driver.plans[1].decode_rows).tolist() == [0]
    driver.apply()
    assert driver.finish("a") == "stop"
    assert driver.gauge("pages_used") == 1, "the row holds its page while a step is in flight"
    driver.apply()
    assert driver.text("a") == [stop]
    assert driver.gauge("pages_used") == 0


def test_logprobs_travel_with_their_tokens() -> None:
    driver = small()
    driver.submit("a", [5, 6], max_tokens=2, logprobs=3)
    driver.submit("b", [7], max_tokens=2)
    driver.run()
    assert [len(d.logprobs) for d in driver.deltas["a"]] == [1, 1]
    top = unpack_ids(driver.deltas["a"][0].logprobs[0].top_ids)
    assert top[0] == driver.text("a")[0]
    assert len(top) == 3
    assert [d.logprobs for d in driver.deltas["b"]] == [(), ()]


def test_requests_without_a_seed_get_one_each() -> None:
    driver = small()
    driver.submit("a", [5], 3, temperature=1.0, seed=None)
    driver.submit("b", [5], 3, temperature=1.0, seed=None)
    driver.run()
    seeds = [s.sampling.seed for p in driver.plans for s in p.starts]
    assert seeds == [1, 2]
    assert driver.text("a") == expect([5], 3, temperature=1.0, seed=1)


def test_history_is_sent_only_for_the_penalties_that_need_it() -> None:
    driver = small()
    driver.submit("none", [5, 6], 2)
    driver.submit("repeats", [7, 8], 2, repetition_penalty=1.1)
    driver.submit("counts", [9], 2, presence_penalty=0.5)
    driver.run()
    starts = [start for plan in driver.plans for start in plan.starts]
    assert [len(start.prompt_ids) // 4 for start in starts] == [0, 2, 0]


# ---------------------------------------------------------------- the edges of the context


def test_the_refusal_names_the_numbers_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    driver = small(page_size=16, num_pages=8)
    with caplog.at_level(logging.WARNING, "freetoken"):
        answer = driver.submit("a", [3] * 200)
    assert isinstance(answer, Failed)
    assert answer.message == (
        "prompt needs 200 tokens (13 pages of 16), the pool holds 128 (8); "
        "raise --context-tokens or shorten the prompt"
    )
    assert "request.refused id=a tokens=200 context=128 pages=13 context_pages=8" in caplog.text
    assert driver.gauge("requests_refused") == 1


def test_an_open_ended_request_runs_to_the_wall_beside_others_without_preempting_itself() -> None:
    driver = small(page_size=4, num_pages=16)
    driver.submit("a", [3, 4, 5], None)
    for i in range(6):
        driver.submit(f"b{i}", [10 + i, 2], 6)
    driver.run()
    assert len(driver.text("a")) == 64 - 3
    assert driver.finish("a") == "length"
    resumed = {s.row_id for p in driver.plans for s in p.starts if s.num_output}
    assert driver.plans[0].starts[0].row_id not in resumed
    assert all(driver.finish(f"b{i}") == "length" for i in range(6))


@pytest.mark.parametrize(
    ("prompt", "fields", "param"),
    [
        ([], {}, "prompt"),
        ([1, 256], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"logit_bias": ((256, 1.0),)}, "logit_bias"),
        ([1], {"logit_bias": ((3, float("nan")),)}, "logit_bias"),
        ([1], {"seed": -1}, "seed"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"temperature": -0.1}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"top_p": 1.1}, "top_p"),
        ([1], {"top_k": -1}, "top_k"),
        ([1], {"min_p": 2.0}, "min_p"),
        ([1], {"repetition_penalty": 0.0}, "repetition_penalty"),
        ([1], {"repetition_penalty": 1e-38}, "repetition_penalty"),
        ([1], {"frequency_penalty": 1e39}, "frequency_penalty"),
        ([1], {"temperature": 1e39}, "temperature"),
        ([1], {"logit_bias": ((3, 1e39),)}, "logit_bias"),
        ([1], {"min_tokens": 1, "stop_ids": tuple(range(256))}, "stop_token_ids"),
        ([1], {"presence_penalty": float("inf")}, "presence_penalty"),
        ([1], {"min_tokens": -1}, "min_tokens"),
        ([1], {"logprobs": 257}, "logprobs"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_by_field(
    prompt: list[int], fields: dict[str, object], param: str
) -> None:
    answer = small().submit("a", prompt, **fields)  # type: ignore[arg-type]
    assert isinstance(answer, Failed)
    assert answer.code == "invalid_request"
    assert answer.param == param


def test_a_request_id_in_use_is_refused_and_the_first_goes_on() -> None:
    driver = small()
    driver.submit("a", [5], 3)
    driver.plan()
    second = driver.scheduler.submit(b"x", Submit("a", pack_ids([1]), 1, sampling()), 0.0)
    assert isinstance(second, Failed)
    driver.run()
    assert driver.text("a") == expect([5], 3)


# ---------------------------------------------------------------- steps


def test_two_steps_are_in_flight_and_never_three() -> None:
    driver = small()
    driver.submit("a", [1, 2], 9)
    assert driver.plan() is not None
    assert driver.plan() is not None
    assert driver.plan() is None
    assert driver.scheduler.num_in_flight == 2


def test_decodes_ride_along_with_the_chunks_of_a_long_prompt() -> None:
    driver = small(max_step_tokens=8)
    driver.submit("a", [1, 2], 30)
    driver.step()
    driver.submit("b", LONG, 3)
    since = len(driver.plans)
    driver.run()
    chunks = [p for p in driver.plans[since:] if p.extends]
    assert len(chunks) >= 13
    assert all(len(p.decode_rows) == 4 for p in chunks[:13])
    assert all(p.mode is StepMode.ON_DEMAND for p in driver.plans)


def test_a_long_prompt_passes_and_decodes_go_on_between_passes() -> None:
    driver = small(max_on_demand_tokens=4, max_pass_tokens=30, max_step_tokens=16)
    driver.submit("a", [1, 2], 40)
    driver.step()
    driver.step()
    since = len(driver.plans)
    driver.submit("b", LONG, 3)
    driver.submit("short", [7, 7, 7], 3)
    driver.run()
    modes = [p.mode for p in driver.plans[since : since + 8]]
    assert modes.count(StepMode.PASS) == 4
    for plan in driver.plans:
        if plan.mode is StepMode.PASS:
            assert not plan.decode_rows
            assert 4 < count_extended([plan]) <= 30
        else:
            assert count_extended([plan]) <= 4
    for one, two in pairwise(modes):
        assert StepMode.ON_DEMAND in (one, two)
    assert driver.text("b") == expect(LONG, 3)
    assert driver.text("short") == expect([7, 7, 7], 3)


def test_a_short_extend_on_a_full_hit_stays_on_demand() -> None:
    driver = small(max_on_demand_tokens=4, max_pass_tokens=200)
    driver.submit("a", LONG, 3)
    driver.run()
    since = len(driver.plans)
    driver.submit("b", [*LONG, 9, 9], 3)
    driver.run()
    assert driver.extended(since) <= 4
    assert {p.mode for p in driver.plans[since:]} == {StepMode.ON_DEMAND}


def test_a_row_id_is_forgotten_before_it_is_used_again() -> None:
    driver = small(max_rows=1)
    for i in range(3):
        driver.submit(f"r{i}", [i + 1], 2)
    driver.run()
    forgotten = [r for p in driver.plans for r in unpack_ids(p.forget_rows)]
    assert forgotten == [0, 0]


def test_the_probe_is_invisible_and_leaves_nothing_behind() -> None:
    driver = small()
    driver.scheduler.probe(0.0)
    assert driver.scheduler.last_token_s is None
    driver.run()
    assert driver.scheduler.last_token_s == driver.now_s
    gauges = driver.scheduler.gauges()
    assert gauges["pages_free"] == 64
    assert gauges["requests"] == gauges["output_tokens"] == gauges["requests_finished"] == 0
    assert not driver.deltas


def test_counters_add_up() -> None:
    driver = small()
    driver.submit("a", LONG, 5)
    driver.run()
    driver.submit("b", LONG, 5)
    driver.run()
    driver.submit("c", [1], 50)
    driver.step()
    driver.abort("c")
    driver.run()
    gauges = driver.scheduler.gauges()
    assert gauges["requests"] == 3
    assert gauges["requests_finished"] == 2
    assert gauges["requests_aborted"] == 1
    assert gauges["prompt_tokens"] == 201
    assert gauges["cached_tokens"] == 99
    assert gauges["output_tokens"] == 10 + len(driver.text("c"))
    assert gauges["steps"] == len(driver.plans)
    assert gauges["distinct_experts"] == gauges["expert_bytes_pass"] == 0
    assert gauges["pages_used"] == gauges["running"] == gauges["waiting"] == 0
    assert gauges["pages_free"] + gauges["pages_cached"] == 64


def test_an_extend_and_an_end_are_one_log_line_each(caplog: pytest.LogCaptureFixture) -> None:
    driver = small()
    driver.submit("z", LONG, 1)
    driver.run()
    with caplog.at_level(logging.INFO, "freetoken"):
        driver.submit("a", LONG, 5)
        driver.run()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("extend id=a tokens=1 cached=99 path=on_demand ms=")
    assert lines[0].endswith(" bytes=0 hits=0 misses=0 distinct=0")
    assert lines[1].startswith("request.end id=a prompt=100 cached=99 output=5 finish=length ttft")
    assert FinishReason.LENGTH in lines[1]
