"""The scheduler with the fake model: whole requests, and what the plans were."""

from __future__ import annotations

import logging
from itertools import pairwise

import msgspec
import pytest

from freetoken.wire.messages import (
    Accepted,
    Failed,
    FinishReason,
    StepMode,
    StepResult,
    Submit,
    pack_ids,
    unpack_ids,
)
from tests.fakes.model import complete
from tests.fakes.worker import WorkerScript
from tests.scheduler.drive import Driver, count_extended, sampling

LONG = [1 + i % 50 for i in range(100)]


def small(**fields: object) -> Driver:
    values = {"page_size": 4, "num_pages": 64, "max_step_tokens": 16, **fields}
    return Driver(WorkerScript(**values))  # type: ignore[arg-type]


def expect(prompt: list[int], max_tokens: int, **fields: object) -> list[int]:
    return complete(prompt, max_tokens, sampling(**fields), 256)


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


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("rows", [1, 4])
def test_prompts_around_the_context_are_accepted_clamped_or_refused(
    page_size: int, rows: int
) -> None:
    n = 128
    driver = small(page_size=page_size, num_pages=n // page_size, max_rows=rows)
    for length in (n - 2, n - 1, n, n + 1):
        for max_tokens in (None, 1, 2, 3, n):
            request_id = f"{length}-{max_tokens}"
            answer = driver.submit(request_id, [3] * length, max_tokens)
            if length < n:
                room = n - length
                clamped = room if max_tokens is None else min(room, max_tokens)
                assert answer == Accepted(request_id, length, clamped)
            else:
                assert isinstance(answer, Failed)
                assert answer.code == "context_length_exceeded"
    driver.run()
    for request_id, accepted in driver.accepted.items():
        assert len(driver.text(request_id)) == accepted.max_tokens
        assert driver.finish(request_id) == "length"
    driver.scheduler.check_idle()


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


# ---------------------------------------------------------------- the prefix cache


def test_a_repeated_prompt_recomputes_one_token() -> None:
    driver = small()
    driver.submit("a", LONG, 5)
    driver.run()
    since = len(driver.plans)
    driver.submit("b", LONG, 5)
    driver.run()
    assert driver.text("b") == driver.text("a")
    assert driver.extended(since) == 1
    assert driver.cached("b") == 99
    assert driver.cached("a") == 0


def test_the_next_turn_reuses_up_to_the_last_common_token() -> None:
    """The template adds an opener (here 60, 61) only when it generates."""
    driver = small()
    driver.submit("one", [*LONG[:50], 60, 61], 6)
    driver.run()
    answer = driver.text("one")
    driver.submit("two", [*LONG[:50], *answer, 70, 71], 6)
    driver.run()
    assert driver.cached("two") == 50
    driver.submit("three", [*LONG[:50], 60, 61, *answer, 70, 71], 6)
    driver.run()
    assert driver.cached("three") == 52 + 5, "the last token's k/v was never needed"


def test_identical_prompts_together_are_computed_once() -> None:
    driver = small(num_pages=200)
    for i in range(8):
        driver.submit(f"r{i}", LONG, 4, seed=i, temperature=1.0)
    driver.run()
    assert driver.extended() == 100 + 7 * 4, "a hundred tokens are 25 pages; the last is recomputed"
    for i in range(8):
        assert driver.text(f"r{i}") == expect(LONG, 4, seed=i, temperature=1.0)


def test_a_follower_starts_as_soon_as_the_shared_part_is_there() -> None:
    driver = small(num_pages=200, max_step_tokens=8)
    driver.submit("leader", LONG, 4)
    driver.submit("follower", [*LONG[:20], 99], 4)
    driver.run()
    extends = [(e.row_id, e.cached_len) for p in driver.plans for e in p.extends]
    leader_row = extends[0][0]
    first = next(i for i, (row, _) in enumerate(extends) if row != leader_row)
    assert extends[first][1] == 20
    assert first < len(extends) - 3, "the leader is far from done"
    assert driver.text("follower") == expect([*LONG[:20], 99], 4)


def test_followers_go_on_when_their_leader_is_aborted() -> None:
    driver = small(max_step_tokens=8)
    driver.submit("leader", LONG, 4)
    driver.submit("follower", LONG, 4)
    driver.step()
    assert driver.gauge("waiting") == 1
    driver.abort("leader")
    driver.run()
    assert driver.text("follower") == expect(LONG, 4)
    assert driver.gauge("waiting") == 0


def test_different_salts_share_nothing() -> None:
    driver = small()
    driver.submit("a", LONG, 2, salt="x")
    driver.run()
    driver.submit("b", LONG, 2, salt="y")
    driver.run()
    assert driver.cached("b") == 0


def test_a_prompt_that_needs_the_whole_pool_goes_without_the_page_to_copy_from() -> None:
    driver = small(page_size=4, num_pages=4, context_tokens=16)
    driver.submit("a", [1, 2, 3, 4, 5, 6], 1)
    driver.run()
    driver.submit("b", [1, 2, 3, 4, 5, 7, *range(8, 17)], 1)
    driver.run()
    assert driver.cached("b") == 4
    assert driver.text("b") == expect([1, 2, 3, 4, 5, 7, *range(8, 17)], 1)


# ---------------------------------------------------------------- scarce pages and rows


def short_outputs(driver: Driver) -> None:
    """Let the scheduler learn that outputs are short, so that it admits more than will fit."""
    for i in range(64):
        driver.submit(f"short{i}", [200], 1)
        driver.run()


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 40), (2, 24), (4, 12)])
def test_the_youngest_is_preempted_and_everything_finishes(page_size: int, num_pages: int) -> None:
    driver = small(page_size=page_size, num_pages=num_pages, max_rows=6)
    short_outputs(driver)
    since = len(driver.plans)
    for i in range(6):
        driver.submit(f"r{i}", [i, i + 1], 18, seed=i, temperature=1.0)
    driver.run()
    assert driver.gauge("preemptions") > 0
    for i in range(6):
        assert driver.text(f"r{i}") == expect([i, i + 1], 18, seed=i, temperature=1.0)
    resumed = {s.sampling.seed for p in driver.plans[since:] for s in p.starts if s.num_output}
    assert resumed, "a preempted row goes on where it was"
    assert 0 not in resumed, "the oldest is never preempted"
    driver.scheduler.check_idle()


def test_a_preempted_row_finds_its_pages_in_the_tree() -> None:
    driver = small(page_size=1, num_pages=20, max_rows=2, context_tokens=20)
    short_outputs(driver)
    since = len(driver.plans)
    driver.submit("old", [1, 2], 9)
    driver.submit("young", [3, 4], 13)
    driver.run()
    assert driver.gauge("preemptions") == 1
    resumes = [
        extend.cached_len
        for plan in driver.plans[since:]
        for start in plan.starts
        for extend in plan.extends
        if start.num_output and extend.row_id == start.row_id
    ]
    assert len(resumes) == 1
    assert resumes[0] > 0
    assert driver.text("young") == expect([3, 4], 13)


def test_a_row_alone_waits_for_the_page_that_a_copy_still_locks() -> None:
    """Pool of three pages: one row's own, one with the source of its copy, one more to come."""
    driver = small(page_size=3, num_pages=3, max_rows=1, max_step_tokens=1)
    driver.submit("a", [0], 8)
    driver.run()
    driver.submit("b", [0, 2, 0], 6)
    driver.run()
    assert driver.text("b") == expect([0, 2, 0], 6)


def extending_row_preempted() -> Driver:
    """`old` takes a page with each token until `young`, still extending, must leave; none of its
    steps is in flight then."""
    driver = small(page_size=1, num_pages=14, max_rows=3, max_step_tokens=1)
    short_outputs(driver)
    driver.submit("old", [1], 13)
    driver.plan()
    driver.apply()
    driver.submit("young", [2, 3, 4, 5, 6, 7, 8, 9], 2)
    driver.submit("follower", [2, 3, 4, 5, 6, 7, 8, 9], 2)
    while not driver.gauge("preemptions"):
        assert driver.plan() is not None
        driver.apply()
    assert not driver.text("young")
    return driver


def test_an_extending_row_is_preempted_between_its_chunks() -> None:
    driver = extending_row_preempted()
    driver.run()
    assert driver.text("old") == expect([1], 13)
    for name in ("young", "follower"):
        assert driver.text(name) == expect([2, 3, 4, 5, 6, 7, 8, 9], 2)


def test_followers_of_a_preempted_row_do_not_depend_on_it() -> None:
    driver = extending_row_preempted()
    driver.abort("young")
    driver.run()
    assert driver.text("follower") == expect([2, 3, 4, 5, 6, 7, 8, 9], 2)


def test_thirty_two_requests_with_a_long_prefix_all_finish_in_a_small_pool() -> None:
    driver = small(page_size=4, num_pages=40, max_rows=16)
    for i in range(32):
        driver.submit(f"r{i}", [*LONG, i, i], 8)
    driver.run()
    for i in range(32):
        assert driver.text(f"r{i}") == expect([*LONG, i, i], 8)
    assert driver.extended() < 100 + 32 * 20


def test_a_big_request_at_the_head_is_not_overtaken_for_ever() -> None:
    driver = small(page_size=4, num_pages=32, max_rows=8)
    for i in range(4):
        driver.submit(f"small{i}", [i], 40)
    driver.step()
    driver.submit("big", LONG, 8)
    for i in range(30):
        driver.submit(f"late{i}", [100 + i], 2)
    while not driver.is_done("big"):
        assert driver.step()
    assert driver.text("big") == expect(LONG, 8)
    driver.run()


def test_a_higher_priority_goes_first_and_ages() -> None:
    driver = small(max_rows=1)
    driver.submit("first", [1], 2)
    driver.submit("low", [2], 2, priority=0)
    driver.submit("high", [3], 2, priority=1)
    driver.now_s = 11.0
    driver.submit("late", [4], 2, priority=1)
    order = []
    while driver.step():
        order += [r for r in driver.deltas if driver.is_done(r) and r not in order]
    assert order.index("high") < order.index("low") < order.index("late")


# ---------------------------------------------------------------- bounds of the queue


def test_a_full_queue_answers_queue_full_with_a_time_to_retry() -> None:
    driver = Driver(WorkerScript(max_rows=1), max_queued=(2, 1000))
    for i in range(3):
        driver.submit(f"r{i}", [i + 1], 5)
        driver.plan()
    refused = driver.submit("r3", [9], 5)
    assert isinstance(refused, Failed)
    assert refused.code == "queue_full"
    assert refused.retry_after_s is not None
    assert refused.retry_after_s >= 1
    assert "2 requests are waiting, the limit is 2" in refused.message
    driver.run()
    assert isinstance(driver.submit("r4", [9], 5), Accepted)


def test_queued_tokens_are_bounded_too_but_one_prompt_always_has_room() -> None:
    driver = Driver(WorkerScript(max_rows=1), max_queued=(100, 50))
    assert isinstance(driver.submit("r0", [1] * 80, 1), Accepted)
    refused = driver.submit("r1", [2] * 10, 1)
    assert isinstance(refused, Failed)
    assert "80 prompt tokens are waiting, 10 more exceed the limit of 50" in refused.message
    driver.run()
    assert driver.scheduler.num_waiting == 0


# ---------------------------------------------------------------- aborts, failures, losses


@pytest.mark.parametrize("steps", range(9))
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_an_abort_at_any_moment_gives_everything_back(steps: int, ahead: int) -> None:
    driver = small(max_step_tokens=40)
    driver.submit("other", [9, 8, 7], 12)
    driver.submit("a", LONG, 3)
    for _ in range(steps):
        driver.step()
    for _ in range(ahead):
        driver.plan()
    was_done = driver.is_done("a")
    driver.abort("a")
    assert was_done or driver.finish("a") == "abort"
    driver.abort("a")
    driver.run()
    assert driver.text("other") == expect([9, 8, 7], 12)
    driver.scheduler.check_idle()
    driver.submit("again", [*LONG, 3], 3)
    driver.run()
    assert driver.text("again") == expect([*LONG, 3], 3)


def test_an_api_cannot_abort_what_belongs_to_another() -> None:
    driver = small()
    driver.submit("a", [1], 3, api=b"one")
    driver.abort("a", api=b"two")
    driver.run()
    assert driver.finish("a") == "length"


def test_a_failed_step_fails_its_rows_and_keeps_their_pages_out_of_the_cache() -> None:
    driver = small(max_step_tokens=40)
    driver.submit("a", LONG, 3)
    driver.plan(fails=True)
    driver.submit("later", [9, 8], 3)
    driver.apply()
    assert driver.failed["a"].code == "step_failed"
    driver.run()
    assert driver.text("later") == expect([9, 8], 3)
    driver.submit("again", LONG, 3)
    driver.run()
    assert driver.cached("again") == 0
    assert driver.text("again") == expect(LONG, 3)
    driver.scheduler.check_idle()


@pytest.mark.parametrize("page_size", [1, 4])
def test_rows_of_a_failed_step_are_void_in_the_next_one(page_size: int) -> None:
    """What the next step says was computed for them rests on k/v that was never written."""
    driver = small(page_size=page_size)
    driver.submit("a", [1, 2], 9)
    driver.plan()
    driver.apply()
    driver.plan(fails=True)
    driver.plan()
    driver.apply()
    assert driver.failed["a"].code == "step_failed"
    assert driver.gauge("pages_used") > 0
    text = driver.text("a")
    driver.run()
    assert driver.text("a") == text
    driver.scheduler.check_idle()
    driver.submit("b", [1, 2, *expect([1, 2], 9)], 4)
    driver.run()
    assert driver.text("b") == expect([1, 2, *expect([1, 2], 9)], 4)


def test_a_result_that_does_not_match_its_plan_fails_the_step() -> None:
    driver = small()
    driver.submit("a", [1, 2], 9)
    driver.plan()
    result = driver.in_flight[0]
    assert isinstance(result, StepResult)
    driver.in_flight[0] = msgspec.structs.replace(result, row_ids=b"\7\0\0\0")
    driver.apply()
    assert driver.failed["a"].code == "step_failed"
    driver.submit("b", [1, 2], 2)
    driver.run()
    assert driver.text("b") == expect([1, 2], 2)


def test_results_of_other_steps_have_no_effect() -> None:
    driver = small()
    driver.submit("a", [1, 2], 2)
    driver.plan()
    result = driver.in_flight[0]
    assert isinstance(result, StepResult)
    stale = msgspec.structs.replace(result, step_id=77)
    assert driver.scheduler.apply(stale, 0.0) is None
    assert driver.scheduler.fail_step(77, "late", 0.0) is None
    driver.run()
    assert driver.scheduler.apply(stale, 0.0) is None
    assert driver.text("a") == expect([1, 2], 2)


def test_a_lost_worker_fails_what_is_open_and_the_next_one_starts_clean() -> None:
    driver = small()
    driver.submit("running", LONG, 9)
    driver.step()
    driver.submit("waiting", [4], 2)
    failed = driver.lose_worker()
    assert [m.request_id for _, m in failed] == ["running", "waiting"]
    assert {m.code for _, m in failed} == {"engine_unavailable"}
    assert all(m.retry_after_s for _, m in failed)
    driver.submit("b", LONG, 3)
    driver.run()
    assert driver.cached("b") == 0
    assert driver.text("b") == expect(LONG, 3)


def test_without_a_worker_requests_are_told_to_come_back() -> None:
    driver = small()
    driver.scheduler.detach("loading again", 0.0)
    answer = driver.submit("a", [1], 1)
    assert isinstance(answer, Failed)
    assert answer.code == "engine_unavailable"
    assert "loading again" in answer.message
    assert answer.retry_after_s is not None
    assert driver.scheduler.plan(0.0) is None


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
    assert lines[0].endswith(" bytes=0")
    assert lines[1].startswith("request.end id=a prompt=100 cached=99 output=5 finish=length ttft")
    assert FinishReason.LENGTH in lines[1]
