"""Step plans on the hash model: order of operations, void rows, retries, refusals.

All of it twice: computed when launched, as on a CPU, and queued in padded buckets, as on a GPU.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from freetoken.wire.messages import (
    Extend,
    PageRun,
    RowStart,
    Sampling,
    StepMode,
    pack_ids,
    unpack_ids,
)
from freetoken.worker.faults import StepError
from tests.worker.fakes import VOCAB_SIZE, HashModel, expected_next, expected_text, new_runner
from tests.worker.plans import GREEDY, decode_plan, make_plan, start_plan, tokens_of

PAGE_SIZE = 4


@pytest.fixture(params=[False, True], ids=["direct", "queued"])
def make_runner(request):
    """A function that makes a runner of a model, with changed limits."""

    def make(model=None, **changes):
        return new_runner(model or HashModel(), queues_steps=request.param, **changes)

    return make


def test_extend_then_decode_gives_the_text(make_runner):
    runner, prompt = make_runner(), [3, 1, 4, 1, 5]
    text = [tokens_of(runner.execute(start_plan(0, prompt, 0)))[0]]
    for position in range(5, 12):
        text.append(tokens_of(runner.execute(decode_plan({0: position})))[0])
    assert text == expected_text(prompt, 8)


def test_chunks_sample_only_from_the_last(make_runner):
    runner, prompt = make_runner(), list(range(10))
    first = runner.execute(start_plan(0, prompt[:6], 0, is_last=False))
    assert tokens_of(first) == {}
    plan = make_plan(extends=(Extend(0, 6, pack_ids(prompt[6:]), True),))
    assert tokens_of(runner.execute(plan)) == {0: expected_next(prompt)}


def test_extends_come_before_decode_rows_in_the_result(make_runner):
    runner = make_runner()
    a = tokens_of(runner.execute(start_plan(2, [1, 2], 0)))[2]
    plan = start_plan(1, [5, 6, 7], 8, decode_rows=pack_ids([2]), decode_positions=pack_ids([2]))
    result = runner.execute(plan)
    assert list(unpack_ids(result.row_ids)) == [1, 2]
    assert tokens_of(result) == {1: expected_next([5, 6, 7]), 2: expected_next([1, 2, a])}


def test_a_prefix_hit_on_a_copied_page_gives_the_cold_text(make_runner):
    runner, prompt = make_runner(), [9, 8, 7, 6, 5, 4]
    runner.execute(start_plan(0, prompt, 0))
    longer = [*prompt, 50]
    plan = make_plan(
        page_copies=((1, 20),),
        starts=(RowStart(1, GREEDY, 0, b"", b""),),
        page_runs=(PageRun(1, 0, pack_ids([0, 20])),),
        extends=(Extend(1, 6, pack_ids([50]), True),),
    )
    assert tokens_of(runner.execute(plan)) == {1: expected_next(longer)}


def test_a_row_id_can_be_forgotten_and_started_in_one_plan(make_runner):
    runner = make_runner()
    runner.execute(start_plan(0, [1, 2, 3], 0))
    again = start_plan(0, [4, 5], 8, forget_rows=pack_ids([0]))
    assert tokens_of(runner.execute(again)) == {0: expected_next([4, 5])}


def test_a_pass_runs_through_forward_pass(make_runner):
    model = HashModel()
    runner = make_runner(model)
    result = runner.execute(start_plan(0, list(range(20)), 0, mode=StepMode.PASS))
    assert tokens_of(result) == {0: expected_next(list(range(20)))}
    assert model.forwards == [("pass", 20)]


def test_a_plan_without_a_forward_answers_empty(make_runner):
    runner = make_runner()
    runner.execute(start_plan(0, [1], 0))
    result = runner.execute(make_plan(forget_rows=pack_ids([0])))
    assert result.row_ids == b""


BAD_PLANS = {
    "row id": start_plan(4, [1], 0),
    "negative row id": decode_plan({-1: 0}),
    "page id": start_plan(1, [1], 30),
    "negative page id": start_plan(1, [1], -1),
    "row never started": decode_plan({1: 5}),
    "wrong position": decode_plan({0: 5}),
    "token id": start_plan(1, [VOCAB_SIZE], 8),
    "negative token id": start_plan(1, [-1], 8),
    "no page for the tokens": start_plan(1, list(range(9)), 8, num_pages=2),
    "no tokens": start_plan(1, [], 8),
    "hole in the pages": make_plan(page_runs=(PageRun(0, 12, pack_ids([9])),)),
    "more pages than the context": start_plan(1, [1], 8, num_pages=17),
    "started twice": start_plan(0, [1], 8),
    "row twice": decode_plan({0: 3}, extends=(Extend(0, 3, pack_ids([1]), True),)),
    "extended at a hole": make_plan(extends=(Extend(0, 4, pack_ids([1]), True),)),
    "too many tokens": start_plan(1, [1] * 33, 8, num_pages=9),
    "copy to itself": make_plan(page_copies=((3, 3),)),
    "copy beyond the pool": make_plan(page_copies=((3, 32),)),
    "half an id": make_plan(decode_rows=b"\0\0", decode_positions=b""),
    "fewer positions than rows": make_plan(decode_rows=pack_ids([0]), decode_positions=b""),
    "decode in a pass": decode_plan({0: 3}, mode=StepMode.PASS),
    "some layers": start_plan(1, [1], 8, layers=(0, 1)),
    "a pass beyond the last layer": start_plan(1, [1], 8, layers=(0, 5), mode=StepMode.PASS),
    "a pass of no layers": start_plan(1, [1], 8, layers=(2, 2), mode=StepMode.PASS),
    "a pass that none has begun": start_plan(1, [], 8, layers=(1, 4), mode=StepMode.PASS),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_bad_plan_fails_its_step_and_other_rows_go_on(make_runner, name):
    runner = make_runner(max_step_tokens=32)
    runner.execute(start_plan(0, [1, 2, 3], 0))
    b = tokens_of(runner.execute(start_plan(3, [4, 5], 24)))[3]
    with pytest.raises(StepError):
        runner.execute(BAD_PLANS[name])
    assert tokens_of(runner.execute(decode_plan({3: 2}))) == {3: expected_next([4, 5, b])}
    anew = start_plan(1, [6], 8, forget_rows=pack_ids([0, 1]))
    assert tokens_of(runner.execute(anew)) == {1: expected_next([6])}


def out_of_memory_above(limit):
    def fail(ids):
        if len(ids) > limit:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")

    return fail


def test_out_of_memory_is_retried_in_smaller_pieces(make_runner):
    model = HashModel()
    runner = make_runner(model)
    b = tokens_of(runner.execute(start_plan(1, [5, 6], 16)))[1]
    model.fails = out_of_memory_above(20)
    prompt = list(range(40))
    plan = start_plan(
        0, prompt, 0, num_pages=10, decode_rows=pack_ids([1]), decode_positions=pack_ids([2])
    )
    result = tokens_of(runner.execute(plan))
    assert result == {0: expected_next(prompt), 1: expected_next([5, 6, b])}
    model.forwards.clear()
    runner.execute(start_plan(2, prompt[:30], 20))
    assert max(tokens for _, tokens in model.forwards) <= 20, "later steps stay small"


def test_out_of_memory_at_the_smallest_piece_fails_the_step_three_times_and_serving_goes_on(
    make_runner,
):
    model = HashModel()
    runner = make_runner(model)
    b = tokens_of(runner.execute(start_plan(1, [5, 6], 16)))[1]
    for _ in range(3):
        model.fails = out_of_memory_above(0)
        with pytest.raises(StepError, match="out of memory"):
            runner.execute(start_plan(0, [1, 2, 3], 0, forget_rows=pack_ids([0])))
        model.fails = None
    assert tokens_of(runner.execute(decode_plan({1: 2}))) == {1: expected_next([5, 6, b])}


def test_rows_of_a_failed_step_are_void_in_plans_already_queued(make_runner):
    model = HashModel()
    runner = make_runner(model)
    b = tokens_of(runner.execute(start_plan(1, [5, 6], 16)))[1]
    model.fails = out_of_memory_above(0)
    with pytest.raises(StepError):
        runner.execute(start_plan(0, [1, 2, 3], 0))
    model.fails = None
    queued = decode_plan({0: 3, 1: 2}, page_runs=(PageRun(0, 8, pack_ids([9])),))
    result = runner.execute(queued)
    assert list(unpack_ids(result.row_ids)) == [0, 1], "the scheduler counts on every place"
    assert tokens_of(result)[1] == expected_next([5, 6, b])
    more = make_plan(extends=(Extend(0, 3, pack_ids([1]), True),))
    assert list(unpack_ids(runner.execute(more).row_ids)) == [0]


def test_void_rows_have_a_place_among_logprobs(make_runner):
    model = HashModel()
    runner = make_runner(model)
    runner.execute(start_plan(1, [5, 6], 16, sampling=Sampling(temperature=0.0, logprobs=0)))
    model.fails = out_of_memory_above(0)
    with pytest.raises(StepError):
        runner.execute(start_plan(0, [1, 2, 3], 0))
    model.fails = None
    result = runner.execute(decode_plan({0: 3, 1: 2}))
    assert result.logprobs[0] is None
    assert result.logprobs[1] is not None


def test_not_a_number_fails_the_step(make_runner):
    class Broken(HashModel):
        def _run(self, ids, context, logits_at):
            return torch.full((len(logits_at), VOCAB_SIZE), torch.nan)

    with pytest.raises(StepError, match="NaN"):
        make_runner(Broken()).execute(start_plan(0, [1, 2], 0))


def test_an_error_of_the_model_is_not_swallowed(make_runner):
    def fail(ids):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        make_runner(HashModel(fails=fail)).execute(start_plan(0, [1, 2], 0))


def test_forget_all_frees_every_row(make_runner):
    runner = make_runner()
    runner.execute(start_plan(0, [1, 2], 0))
    runner.forget_all()
    with pytest.raises(StepError, match="free"):
        runner.execute(decode_plan({0: 2}))
    assert tokens_of(runner.execute(start_plan(0, [3], 0))) == {0: expected_next([3])}


def test_a_failed_step_holds_nothing_of_what_it_computed(make_runner):
    held = []

    class Frame:
        """In a frame of the failed forward, as its tensors are."""

    def fail(ids):
        frame = Frame()
        held.append(weakref.ref(frame))
        raise StepError(f"fails with {frame}")

    runner = make_runner(HashModel(fails=fail))
    step = runner.launch(start_plan(0, [1, 2], 0))
    gc.disable()
    try:
        assert held[0]() is None
    finally:
        gc.enable()
    with pytest.raises(StepError, match="fails with"):
        step.finish()
