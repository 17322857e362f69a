"""Two steps in flight: what the second may rest on, and what becomes of it when the first fails."""

from __future__ import annotations

import pytest
import torch

from freetoken.wire.messages import Sampling, StepMode, pack_ids, unpack_ids
from freetoken.worker.faults import StepError
from freetoken.worker.graphs import BUCKETS
from freetoken.worker.pending import VOID_TOKEN
from tests.worker.fakes import VOCAB_SIZE, HashModel, expected_next, expected_text, new_runner
from tests.worker.plans import decode_plan, make_plan, start_plan, tokens_of


class PoisonedModel(HashModel):
    """Rows of which a page holds `poison` have logits without a distribution."""

    poison = 90

    def _run(self, ids, context, logits_at):
        logits = super()._run(ids, context, logits_at)
        for i, at in enumerate(logits_at.tolist()):
            row, end = int(context.rows[at]), int(context.positions[at]) + 1
            pages = context.page_table[row, : -(-end // 4)].long()
            if (context.pools.k[0][pages, :, 0, 0].flatten()[:end] == self.poison).any():
                logits[i] = torch.nan
        return logits


def poisoned_runner():
    """On a CPU the sampler would refuse at once; on the way that a GPU takes, the result does."""
    return new_runner(PoisonedModel(), queues_steps=True)


def test_a_decode_step_is_launched_before_the_token_it_needs_is_known():
    runner, prompt = new_runner(HashModel(), queues_steps=True), [3, 1, 4]
    steps = [runner.launch(start_plan(0, prompt, 0))]
    text = []
    for position in range(3, 10):
        steps.append(runner.launch(decode_plan({0: position})))
        text.append(tokens_of(steps.pop(0).finish())[0])
    text.append(tokens_of(steps.pop(0).finish())[0])
    assert text == expected_text(prompt, 8)


def test_a_plan_that_cannot_be_launched_fails_after_the_step_before_it():
    runner = new_runner(HashModel(), queues_steps=True)
    first = runner.launch(start_plan(0, [1, 2], 0))
    second = runner.launch(decode_plan({0: 7}))
    assert tokens_of(first.finish()) == {0: expected_next([1, 2])}, "its tokens stay good"
    with pytest.raises(StepError, match="position 7"):
        second.finish()
    assert tokens_of(runner.execute(decode_plan({0: 2}))) == {0: VOID_TOKEN}


def test_rows_of_a_poisoned_step_are_void_in_the_one_behind_it():
    runner = poisoned_runner()
    b = tokens_of(runner.execute(start_plan(1, [5, 6], 16)))[1]
    poisoned = runner.launch(start_plan(0, [90], 0))
    behind = runner.launch(decode_plan({0: 1, 1: 2}))
    with pytest.raises(StepError, match=r"rows \[0\] leave nothing"):
        poisoned.finish()
    result = behind.finish()
    assert list(unpack_ids(result.row_ids)) == [0, 1]
    assert tokens_of(result) == {0: VOID_TOKEN, 1: expected_next([5, 6, b])}
    c = tokens_of(result)[1]
    assert tokens_of(runner.execute(decode_plan({0: 2, 1: 3})))[1] == expected_next([5, 6, b, c])
    anew = start_plan(0, [7], 8, forget_rows=pack_ids([0]))
    assert tokens_of(runner.execute(anew)) == {0: expected_next([7])}


def test_rows_beside_a_poisoned_row_fail_with_its_step():
    runner = poisoned_runner()
    runner.execute(start_plan(1, [5, 6], 16))
    plan = start_plan(0, [90], 0, decode_rows=pack_ids([1]), decode_positions=pack_ids([2]))
    with pytest.raises(StepError, match=r"rows \[0\]"):
        runner.execute(plan)
    assert tokens_of(runner.execute(decode_plan({1: 3}))) == {1: VOID_TOKEN}


def test_what_a_poisoned_row_drew_is_no_token_id():
    runner = poisoned_runner()
    poisoned = runner.launch(start_plan(0, [90], 0))
    runner.launch(decode_plan({0: 1}))  # the hash model asserts that ids are in the vocabulary
    with pytest.raises(StepError):
        poisoned.finish()


def test_steps_without_tokens_keep_their_turn():
    runner = new_runner(HashModel(), queues_steps=True)
    steps = [
        runner.launch(start_plan(0, [1, 2, 3], 0, step_id=1)),
        runner.launch(decode_plan({}, step_id=2, forget_rows=pack_ids([0]))),
        runner.launch(start_plan(0, [4], 8, step_id=3)),
    ]
    results = [step.finish() for step in steps]
    assert [result.step_id for result in results] == [1, 2, 3]
    assert tokens_of(results[2]) == {0: expected_next([4])}


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 16, 17])
def test_padding_of_a_bucket_changes_nothing(num_rows, num_tokens):
    texts = []
    for queues_steps in (False, True):
        runner = new_runner(HashModel(), queues_steps=queues_steps, num_pages=64)
        prompts = {row: [row + 1] * num_tokens for row in range(num_rows)}
        texts.append([])
        for row, prompt in prompts.items():
            result = runner.execute(start_plan(row, prompt, 10 * row))
            texts[-1].append(tokens_of(result))
        for i in range(3):
            plan = decode_plan(dict.fromkeys(prompts, num_tokens + i))
            texts[-1].append(tokens_of(runner.execute(plan)))
    assert texts[0] == texts[1]


def test_more_rows_than_the_largest_graph_has_tokens_decode_in_one_step():
    num_rows = BUCKETS[-1] + 3
    changes = {"max_rows": num_rows, "num_pages": num_rows, "max_step_tokens": num_rows}
    runner = new_runner(HashModel(), queues_steps=True, **changes)
    starts = [start_plan(row, [row % 90], row, num_pages=1) for row in range(num_rows)]
    plan = make_plan(
        starts=[start for plan in starts for start in plan.starts],
        page_runs=[run for plan in starts for run in plan.page_runs],
        extends=[extend for plan in starts for extend in plan.extends],
    )
    first = tokens_of(runner.execute(plan))
    assert first == {row: expected_next([row % 90]) for row in range(num_rows)}
    second = tokens_of(runner.execute(decode_plan(dict.fromkeys(range(num_rows), 1))))
    assert second == {row: expected_next([row % 90, first[row]]) for row in range(num_rows)}


def test_logprobs_come_with_the_rows_that_asked_for_them():
    runner = new_runner(HashModel(), queues_steps=True)
    asking = Sampling(temperature=0.0, logprobs=2)
    runner.execute(start_plan(0, [1, 2], 0))
    first = runner.execute(start_plan(1, [5, 6], 16, sampling=asking))
    assert len(first.logprobs) == 1
    result = runner.execute(decode_plan({0: 2, 1: 2}))
    assert result.logprobs[0] is None
    assert unpack_ids(result.logprobs[1].top_ids)[0] == tokens_of(result)[1]


def test_memory_that_is_short_splits_a_step_into_several_on_the_device():
    model = HashModel()
    runner = new_runner(model, queues_steps=True)
    b = tokens_of(runner.execute(start_plan(1, [5, 6], 16)))[1]

    def fail(ids):
        if len(ids) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.fails = fail
    prompt = list(range(40))
    decode = {"decode_rows": pack_ids([1]), "decode_positions": pack_ids([2])}
    asking = Sampling(temperature=0.0, logprobs=0)
    result = runner.execute(start_plan(0, prompt, 0, num_pages=10, sampling=asking, **decode))
    assert list(unpack_ids(result.row_ids)) == [0, 1]
    assert tokens_of(result) == {0: expected_next(prompt), 1: expected_next([5, 6, b])}
    assert result.logprobs[0] is not None
    assert result.logprobs[1] is None
    assert tokens_of(runner.execute(decode_plan({1: 3})))[1] < VOCAB_SIZE


def test_a_pass_runs_between_queued_steps():
    runner = new_runner(HashModel(), queues_steps=True)
    first = runner.launch(start_plan(0, [1, 2], 0))
    second = runner.launch(start_plan(1, [5] * 20, 8, mode=StepMode.PASS))
    a = tokens_of(first.finish())[0]
    b = tokens_of(second.finish())[1]
    expected = {0: expected_next([1, 2, a]), 1: expected_next([5] * 20 + [b])}
    assert tokens_of(runner.execute(decode_plan({0: 2, 1: 20}))) == expected
