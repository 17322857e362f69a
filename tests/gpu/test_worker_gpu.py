"""The worker on a GPU: from a checkpoint to tokens, compared with the same worker on the CPU."""

from __future__ import annotations

import logging
import time

import pytest
import torch

from freetoken.config import Config
from freetoken.wire.messages import Extend, Sampling, StepMode, pack_ids
from freetoken.worker.checkpoint import CheckpointSource
from freetoken.worker.faults import StepError
from freetoken.worker.link import Progress
from freetoken.worker.startup import start
from tests.model import tiny
from tests.worker.plans import GREEDY, decode_plan, make_plan, start_plan, tokens_of

# The compiler and torch's debug mode warn of what they are.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

BUDGET = 8 << 30
PROMPT = [(7 * i * i + 3 * i + 5) % tiny.VOCAB for i in range(120)]
PAGES_PER_ROW = 10
NUM_OUTPUT = 20

SAMPLINGS = (
    GREEDY,
    Sampling(seed=1, temperature=0.9, top_k=20, top_p=0.9),
    Sampling(seed=2, presence_penalty=0.5, logit_bias=((3, 2.0),), logprobs=2),
    Sampling(seed=3, min_tokens=5, stop_ids=(1, 2)),
)


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss", "llama"])
def path(request, tmp_path_factory):
    model = tiny.make_model(tiny.make_config(request.param))
    return tiny.save(model, tmp_path_factory.mktemp(request.param))


def start_on(device, path, **options):
    """A started worker in fp32, 4 rows."""
    config = Config(model=str(path), dtype="float32", max_rows=4, num_pages=64, **options)
    return start(config, CheckpointSource(path, "float32", device), Progress(), BUDGET)


def start_gpu(path, **options):
    return start_on(torch.device("cuda", 0), path, **options)


@pytest.fixture(scope="module")
def expected(path):
    """Tokens of the CPU's worker, by first mode."""
    runner = start_on(torch.device("cpu"), path, **slots_for(path)).runner
    return {mode: texts(runner, mode) for mode in StepMode}


@pytest.fixture(scope="module")
def started(path):
    yield start_gpu(path, **slots_for(path))
    torch._dynamo.reset()


def slots_for(path):
    """Fewer slots than experts, where there are experts."""
    return {} if "llama" in str(path) else {"experts": "slots", "moe_cache_size": 9}


def texts(runner, mode):
    """Tokens of one row for each sampling, with two steps in flight."""
    runner.forget_all()
    found = []
    for row, sampling in enumerate(SAMPLINGS):
        prompt = PROMPT[row : row + 40]
        first = PAGES_PER_ROW * row
        plan = start_plan(row, prompt, first, num_pages=PAGES_PER_ROW, sampling=sampling, mode=mode)
        found.append([tokens_of(runner.execute(plan))[row]])
    steps = []
    for i in range(NUM_OUTPUT + 1):
        if i < NUM_OUTPUT:
            steps.append(runner.launch(decode_plan(dict.fromkeys(range(4), 40 + i))))
        if i > 0:
            for row, token in tokens_of(steps.pop(0).finish()).items():
                found[row].append(token)
    return found


@pytest.mark.parametrize("mode", list(StepMode))
def test_text_is_that_of_the_cpu(started, expected, mode):
    assert texts(started.runner, mode) == expected[mode]


def test_text_is_the_same_without_compilation_and_graphs(path, expected):
    runner = start_gpu(path, compile="off", **slots_for(path)).runner
    assert texts(runner, StepMode.ON_DEMAND) == expected[StepMode.ON_DEMAND]


def test_no_more_memory_is_used_than_priced(path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("freetoken"), "propagate", True)
    with caplog.at_level(logging.INFO, "freetoken"):
        start_gpu(path, **slots_for(path))
    lines = [record.message for record in caplog.records]
    assert any(line.startswith("memory.measured") for line in lines)
    assert not any(line.startswith("memory.over") for line in lines)


def test_launching_decode_steps_never_waits_for_the_device(started):
    """Whatever the rows ask of the sampler; torch raises where it would synchronise."""
    runner = started.runner
    texts(runner, StepMode.ON_DEMAND)
    at = 40 + NUM_OUTPUT
    try:
        torch.cuda.set_sync_debug_mode("error")
        steps = [
            runner.launch(decode_plan(dict.fromkeys(range(4), at + i), page_copies=((0, 63),)))
            for i in range(2)
        ]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for step in steps:
        assert len(tokens_of(step.finish())) == 4


def test_a_launched_step_is_done_some_time_later(started):
    runner = started.runner
    runner.forget_all()
    step = runner.launch(start_plan(0, PROMPT, 0, num_pages=PAGES_PER_ROW))
    deadline = time.monotonic() + 20
    while not step.is_done():
        assert time.monotonic() < deadline
    assert step.finish().stats.step_us > 0


def test_a_pass_in_parts_with_decode_steps_in_between(started):
    runner = started.runner
    runner.forget_all()
    whole = tokens_of(runner.execute(long_plan(layers=(0, 0))))[0]
    runner.forget_all()
    other = tokens_of(runner.execute(start_plan(1, PROMPT[:9], 20, num_pages=4)))[1]
    runner.execute(long_plan(layers=(0, 1)))
    beside = [other, tokens_of(runner.execute(decode_plan({1: 9})))[1]]
    rest = (Extend(0, 0, b"", True),)
    runner.execute(make_plan(mode=StepMode.PASS, layers=(1, 2), extends=rest))
    beside.append(tokens_of(runner.execute(decode_plan({1: 10})))[1])
    last = make_plan(mode=StepMode.PASS, layers=(2, 3), extends=rest)
    assert tokens_of(runner.execute(last)) == {0: whole}
    runner.forget_all()
    alone = [tokens_of(runner.execute(start_plan(1, PROMPT[:9], 20, num_pages=4)))[1]]
    alone += [tokens_of(runner.execute(decode_plan({1: 9 + i})))[1] for i in range(2)]
    assert beside == alone


def long_plan(layers):
    return start_plan(0, PROMPT, 0, num_pages=PAGES_PER_ROW, mode=StepMode.PASS, layers=layers)


def test_a_row_without_a_distribution_fails_its_step_and_serving_goes_on(started, monkeypatch):
    runner = started.runner
    runner.forget_all()
    # Infinite biases of both signs on one token leave a row nothing to draw from.
    bias = ((5, float("inf")), (6, 1.0))
    bad = start_plan(0, PROMPT[:5], 0, sampling=Sampling(temperature=0.0, logit_bias=bias))
    poisoned = runner.launch(bad)
    behind = runner.launch(decode_plan({0: 5}))
    with pytest.raises(StepError, match=r"rows \[0\]"):
        poisoned.finish()
    assert tokens_of(behind.finish()) == {0: 0}
    good = start_plan(0, PROMPT[:5], 0, forget_rows=pack_ids([0]))
    assert len(tokens_of(runner.execute(good))) == 1


def test_counters_of_a_decode_step_are_its_own(started, path):
    runner = started.runner
    runner.forget_all()
    runner.execute(start_plan(0, PROMPT[:20], 0, num_pages=PAGES_PER_ROW))
    stats = runner.execute(decode_plan({0: 20})).stats
    if "llama" in str(path):
        assert stats.distinct_experts == 0
    else:
        assert 0 < stats.distinct_experts == stats.slot_hits + stats.slot_misses <= 3 * 2
