"""Passes in parts: what comes when, what may come in between, and how they end early."""

from __future__ import annotations

import pytest
import torch

from freetoken.wire.messages import Extend, StepMode, pack_ids, unpack_ids
from freetoken.worker.faults import StepError
from freetoken.worker.pending import VOID_TOKEN
from tests.worker.fakes import HashModel, expected_next, new_runner
from tests.worker.plans import decode_plan, make_plan, start_plan, tokens_of

PROMPT = list(range(20))


@pytest.fixture(params=[False, True], ids=["direct", "queued"])
def make_runner(request):
    def make(model=None, **changes):
        return new_runner(model or HashModel(), queues_steps=request.param, **changes)

    return make


def first_part(row, prompt, first_page, hi, **changes):
    return start_plan(row, prompt, first_page, mode=StepMode.PASS, layers=(0, hi), **changes)


def next_part(row, lo, hi, *, is_last=True, cached=0, **changes):
    extends = (Extend(row, cached, b"", is_last),)
    return make_plan(mode=StepMode.PASS, layers=(lo, hi), extends=extends, **changes)


def test_only_the_last_part_has_tokens(make_runner):
    model = HashModel()
    runner = make_runner(model)
    assert tokens_of(runner.execute(first_part(0, PROMPT, 0, 1))) == {}
    assert tokens_of(runner.execute(next_part(0, 1, 3))) == {}
    assert tokens_of(runner.execute(next_part(0, 3, 4))) == {0: expected_next(PROMPT)}
    assert model.forwards == [("pass", 20)], "one pass, not three"


def test_a_single_part_may_name_all_layers(make_runner):
    runner = make_runner()
    assert tokens_of(runner.execute(first_part(0, PROMPT, 0, 4))) == {0: expected_next(PROMPT)}


def test_other_rows_decode_and_extend_between_the_parts(make_runner):
    runner = make_runner()
    b = tokens_of(runner.execute(start_plan(1, [5, 6], 8)))[1]
    runner.execute(first_part(0, PROMPT, 0, 2))
    c = tokens_of(runner.execute(decode_plan({1: 2})))[1]
    assert c == expected_next([5, 6, b])
    newcomer = start_plan(2, [7], 16, decode_rows=pack_ids([1]), decode_positions=pack_ids([3]))
    expected = {2: expected_next([7]), 1: expected_next([5, 6, b, c])}
    assert tokens_of(runner.execute(newcomer)) == expected
    a = tokens_of(runner.execute(next_part(0, 2, 4)))[0]
    assert a == expected_next(PROMPT)
    assert tokens_of(runner.execute(decode_plan({0: 20}))) == {0: expected_next([*PROMPT, a])}


def test_several_rows_of_which_one_samples(make_runner):
    runner = make_runner()
    plan = first_part(0, PROMPT, 0, 2)
    more = first_part(1, [4, 4], 8, 2, is_last=False)
    both = make_plan(
        mode=StepMode.PASS,
        layers=(0, 2),
        starts=plan.starts + more.starts,
        page_runs=plan.page_runs + more.page_runs,
        extends=plan.extends + more.extends,
    )
    runner.execute(both)
    extends = (Extend(0, 0, b"", True), Extend(1, 0, b"", False))
    rest = make_plan(mode=StepMode.PASS, layers=(2, 4), extends=extends)
    assert tokens_of(runner.execute(rest)) == {0: expected_next(PROMPT)}
    end = make_plan(extends=(Extend(1, 2, pack_ids([9]), True),))
    assert tokens_of(runner.execute(end)) == {1: expected_next([4, 4, 9])}


WRONG_PARTS = {
    "a gap": next_part(0, 3, 4),
    "layers done": next_part(0, 1, 4),
    "another row": next_part(1, 2, 4),
    "another position": next_part(0, 2, 4, cached=1),
    "another end": next_part(0, 2, 4, is_last=False),
    "tokens again": make_plan(
        mode=StepMode.PASS, layers=(2, 4), extends=(Extend(0, 0, pack_ids(PROMPT), True),)
    ),
    "its row on demand": make_plan(extends=(Extend(0, 0, pack_ids(PROMPT), True),)),
    "its row beyond it": make_plan(extends=(Extend(0, 20, pack_ids([1]), True),)),
}


@pytest.mark.parametrize("name", WRONG_PARTS)
def test_a_part_that_does_not_fit_fails_and_ends_the_pass_if_it_names_its_rows(make_runner, name):
    runner = make_runner()
    b = tokens_of(runner.execute(start_plan(1, [5, 6], 8)))[1]
    runner.execute(first_part(0, PROMPT, 0, 2))
    with pytest.raises(StepError):
        runner.execute(WRONG_PARTS[name])
    rest = tokens_of(runner.execute(next_part(0, 2, 4)))
    if name == "another row":
        assert rest == {0: expected_next(PROMPT)}
        return
    assert rest == {0: VOID_TOKEN}, "queued already, and void"
    assert tokens_of(runner.execute(decode_plan({1: 2}))) == {1: expected_next([5, 6, b])}
    anew = first_part(0, PROMPT, 0, 4, forget_rows=pack_ids([0]))
    assert tokens_of(runner.execute(anew)) == {0: expected_next(PROMPT)}


def test_a_second_pass_is_refused_and_the_open_one_goes_on(make_runner):
    runner = make_runner()
    runner.execute(first_part(0, PROMPT, 0, 2))
    with pytest.raises(StepError, match="another one is open"):
        runner.execute(first_part(1, [1, 2], 8, 4))
    assert tokens_of(runner.execute(next_part(0, 2, 4))) == {0: expected_next(PROMPT)}


def test_forgetting_its_row_ends_an_open_pass(make_runner):
    runner = make_runner()
    runner.execute(first_part(0, PROMPT, 0, 2))
    runner.execute(make_plan(forget_rows=pack_ids([0])))
    again = first_part(1, PROMPT[:7], 8, 4)
    assert tokens_of(runner.execute(again)) == {1: expected_next(PROMPT[:7])}


def test_a_lost_scheduler_ends_an_open_pass(make_runner):
    runner = make_runner()
    runner.execute(first_part(0, PROMPT, 0, 2))
    runner.forget_all()
    assert tokens_of(runner.execute(first_part(0, [1, 2], 8, 4))) == {0: expected_next([1, 2])}


def out_of_memory_above(limit):
    def fail(ids):
        if len(ids) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")

    return fail


def test_memory_that_is_short_in_a_later_part_starts_the_pass_anew_in_smaller_chunks(make_runner):
    model = HashModel()
    runner = make_runner(model)
    prompt = list(range(60))
    runner.execute(first_part(0, prompt, 0, 2, num_pages=16))
    model.fails = out_of_memory_above(40)
    assert tokens_of(runner.execute(next_part(0, 2, 3))) == {}
    assert tokens_of(runner.execute(next_part(0, 3, 4))) == {0: expected_next(prompt)}
    assert model.forwards == [("pass", 60), ("pass", 60)]
    runner.execute(first_part(1, prompt, 16, 4, num_pages=16))
    assert len(model.forwards) == 3, "later passes keep to chunks that fit"


def test_memory_that_never_suffices_fails_the_rows_of_the_pass_alone(make_runner):
    model = HashModel()
    runner = make_runner(model)
    b = tokens_of(runner.execute(start_plan(1, [5, 6], 8)))[1]
    runner.execute(first_part(0, PROMPT, 0, 2))
    model.fails = out_of_memory_above(0)
    with pytest.raises(StepError, match="out of memory"):
        runner.execute(next_part(0, 2, 3))
    model.fails = None
    assert tokens_of(runner.execute(decode_plan({1: 2}))) == {1: expected_next([5, 6, b])}
    assert tokens_of(runner.execute(next_part(0, 3, 4))) == {0: VOID_TOKEN}
    anew = first_part(2, PROMPT, 16, 4)
    assert list(unpack_ids(runner.execute(anew).row_ids)) == [2]
