"""Queued steps on real models: they draw the tokens that steps computed at once draw."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import pytest
import torch

from freetoken.model.load import load_model, read_shape
from freetoken.wire.messages import Sampling, StepMode, pack_ids
from freetoken.worker.graphs import BUCKETS, buckets_up_to
from freetoken.worker.kv import allocate_pools
from freetoken.worker.runner import Limits, Runner
from tests.model import tiny
from tests.worker.plans import GREEDY, decode_plan, start_plan, tokens_of

PROMPT = [5, 17, 99, 3, 42, 42, 7, 81, 12, 60, 33, 2, 9, 115, 70, 8, 25, 1, 50, 64, 90]
NUM_OUTPUT = 12

LIMITS = Limits(
    max_rows=4,
    num_pages=64,
    page_size=4,
    context_tokens=128,
    vocab_size=tiny.VOCAB,
    max_step_tokens=64,
    chunk_tokens=16,
    max_pass_tokens=128,
    max_on_demand_tokens=8,
)

SAMPLINGS = {
    "greedy": GREEDY,
    "plain": Sampling(seed=1),
    "filtered": Sampling(seed=2, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
    "penalised": Sampling(seed=3, presence_penalty=0.9, frequency_penalty=0.2),
    "repetition": Sampling(temperature=0.0, repetition_penalty=1.4),
    "biased": Sampling(seed=4, logit_bias=((7, 4.0), (9, -50.0))),
    "held": Sampling(seed=5, min_tokens=6, stop_ids=(3, 4, 5)),
}


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss", "llama"])
def path(request, tmp_path_factory):
    model = tiny.make_model(tiny.make_config(request.param))
    return tiny.save(model, tmp_path_factory.mktemp(request.param))


def make_runner(path, *, queues_steps):
    shape = read_shape(path, "float32")
    has_experts = shape.num_moe_layers > 0
    model = load_model(
        path,
        dtype="float32",
        device="cpu",
        experts="slots" if has_experts else "in-place",
        num_slots=7 if has_experts else None,
        progress=lambda what, done, total: None,
        use_kernels=queues_steps,
    )
    pools = allocate_pools(
        shape.kv, num_pages=64, page_size=4, dtype=torch.float32, device=torch.device("cpu")
    )
    return Runner(model, pools, LIMITS, queues_steps=queues_steps)


@pytest.fixture(scope="module")
def runners(path):
    return [make_runner(path, queues_steps=queues) for queues in (False, True)]


def texts(runner, samplings, mode=StepMode.ON_DEMAND):
    """Tokens of one row for each sampling, launched two steps at a time."""
    runner.forget_all()
    found = {}
    for row, sampling in enumerate(samplings):
        prompt = PROMPT[row : row + 12]
        plan = start_plan(row, prompt, 10 * row, num_pages=10, sampling=sampling, mode=mode)
        found[row] = [tokens_of(runner.execute(plan))[row]]
    steps = []
    for i in range(NUM_OUTPUT):
        steps.append(runner.launch(decode_plan(dict.fromkeys(found, 12 + i))))
        if len(steps) == 2:
            for row, token in tokens_of(steps.pop(0).finish()).items():
                found[row].append(token)
    for row, token in tokens_of(steps.pop(0).finish()).items():
        found[row].append(token)
    return list(found.values())


@pytest.mark.parametrize("names", [[name] for name in SAMPLINGS] + [["greedy", "plain", "held"]])
def test_queued_steps_draw_what_direct_ones_draw(runners, names):
    samplings = [SAMPLINGS[name] for name in names]
    direct, queued = (texts(runner, samplings) for runner in runners)
    assert direct == queued


@pytest.mark.parametrize("name", ["greedy", "plain", "filtered"])
def test_rows_that_want_logprobs_draw_what_they_would_draw_without(runners, name):
    """Logprobs are read from the logits that a graph has left, and the row is drawn from them."""
    sampling = SAMPLINGS[name]
    asking = msgspec.structs.replace(sampling, logprobs=3)
    plain, asked = (texts(runners[1], [one, GREEDY]) for one in (sampling, asking))
    assert plain == asked


@pytest.mark.parametrize("mode", list(StepMode))
def test_a_pass_leaves_the_token_that_decoding_goes_on_with(runners, mode):
    direct, queued = (texts(runner, [SAMPLINGS["plain"]], mode) for runner in runners)
    assert direct == queued


def test_counters_of_queued_steps_are_those_of_each_step(path):
    runner = make_runner(path, queues_steps=True)
    steps = [runner.launch(start_plan(0, PROMPT[:5], 0, num_pages=10))]
    steps.append(runner.launch(decode_plan({0: 5})))
    extend, decode = (step.finish().stats for step in steps)
    if extend.distinct_experts:  # the model has experts
        assert extend.slot_hits + extend.slot_misses == extend.distinct_experts
        assert decode.slot_hits + decode.slot_misses == decode.distinct_experts
        assert 0 < decode.distinct_experts <= 2 * 3 * 2
        assert extend.expert_bytes >= extend.slot_misses
    result = runner.execute(
        start_plan(1, PROMPT, 12, num_pages=10, mode=StepMode.PASS, forget_rows=pack_ids([0]))
    )
    assert result.stats.slot_hits + result.stats.slot_misses in (0, 3 * 8)


def test_a_pass_before_any_step_counts_nothing_of_the_steps_before_the_slots_were_filled(path):
    """As at a start where every step is a pass: on demand there was only the warm-up."""
    runner = make_runner(path, queues_steps=True)
    runner.execute(start_plan(0, PROMPT[:5], 0, num_pages=10))
    runner.forget_all()
    runner._model.fill_slots()
    prompt = start_plan(0, PROMPT, 0, num_pages=10, mode=StepMode.PASS)
    stats = [runner.execute(plan).stats for plan in (prompt, decode_plan({0: len(PROMPT)}))]
    assert stats[0].slot_hits + stats[0].slot_misses in (0, 3 * 8)
    assert all(min(s.slot_hits, s.slot_misses, s.expert_bytes) >= 0 for s in stats)


def test_counters_of_a_pass_are_read_with_its_tokens_and_not_asked_of_the_device_later(path):
    """A step may be behind it by then, and would be waited for."""
    direct, queued = (make_runner(path, queues_steps=queues) for queues in (False, True))
    plans = [
        start_plan(1, PROMPT[:4], 12, num_pages=10),
        start_plan(0, PROMPT, 0, num_pages=10, mode=StepMode.PASS),
        decode_plan({1: 4}),
    ]
    expected = [direct.execute(plan).stats for plan in plans]
    first = queued.execute(plans[0])
    steps = [queued.launch(plan) for plan in plans[1:]]
    ring = queued._model._ring
    if ring is not None:
        ring.distinct = None
    stats = [first.stats, *(step.finish().stats for step in steps)]
    for got, want in zip(stats, expected, strict=True):
        assert msgspec.structs.replace(got, step_us=0) == msgspec.structs.replace(want, step_us=0)


def test_buckets_reach_the_largest_step():
    assert buckets_up_to(1) == (1,)
    assert buckets_up_to(36) == (1, 2, 4, 8, 16, 32, 64)
    assert buckets_up_to(256) == buckets_up_to(1000) == BUCKETS


@pytest.fixture
def captures(monkeypatch):
    """As if this were a GPU whose captures fail, until the list that is returned has none left;
    what was done to its streams is noted."""
    stream = SimpleNamespace(device_index=0)
    left, done = [], []

    @contextmanager
    def graph(recorded, **options):
        yield
        if left:
            raise left.pop()

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda given: done.append(given is stream))
    return left, done


def test_steps_run_as_they_are_after_a_capture_that_fails(path, captures):
    errors, restored = captures
    errors.append(RuntimeError("operation not permitted when stream is capturing"))
    runner = make_runner(path, queues_steps=True)
    expected = texts(runner, [GREEDY])
    with pytest.raises(RuntimeError, match="not permitted"):
        runner.capture(lambda done, total: None)
    assert restored == [True]
    runner.graphs.drop()
    assert texts(runner, [GREEDY]) == expected
