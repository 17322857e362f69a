"""A real checkpoint through the whole worker: transformers' text, expert loads, warnings."""

from __future__ import annotations

import logging

import pytest
import torch

from freetoken.config import Config
from freetoken.errors import ConfigError, EngineError
from freetoken.experts.stream import PassRing
from freetoken.model import assemble, load, selfcheck, step
from freetoken.model.shape import measure_shape
from freetoken.wire.messages import Extend, PageRun, Sampling, StepMode, StepPlan, pack_ids
from freetoken.worker import checkpoint as subject
from freetoken.worker import process
from freetoken.worker.checkpoint import CheckpointSource
from freetoken.worker.link import Progress
from freetoken.worker.startup import start
from tests.model import tiny
from tests.worker.plans import decode_plan, make_plan, start_plan, tokens_of

NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 8, 2
BUDGET = 1 << 30
PROMPT = [5, 17, 99, 3, 42, 42, 7, 81, 12, 60, 33, 2, 9, 115, 70, 8, 25, 1, 50, 64, 90]


@pytest.fixture(scope="module")
def plain():
    return tiny.make_model(tiny.make_config("qwen3_moe"))


@pytest.fixture(scope="module")
def checkpoint(plain, tmp_path_factory):
    return tiny.save(plain, tmp_path_factory.mktemp("checkpoint"))


def start_worker(path, **options):
    config = Config(
        model=str(path), dtype="float32", page_size=4, max_rows=4, max_step_tokens=64, **options
    )
    source = CheckedSource(path, config.dtype, torch.device("cpu"))
    return start(config, source, Progress(), BUDGET)


class CheckedSource(CheckpointSource):
    """The self-check takes a second and has a test of its own."""

    def check(self, experts):
        pass


def expected_text(plain, prompt, count):
    ids = plain.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return ids[0, len(prompt) :].tolist()


def decode(runner, row, position, first, count):
    """`count` tokens of a row, `first` included."""
    text = [first]
    for i in range(count - 1):
        text.append(tokens_of(runner.execute(decode_plan({row: position + i})))[row])
    return text


def test_a_large_model_is_measured_once(checkpoint, monkeypatch):
    """Which takes a second for 48 layers, of the few that a worker has to come again."""
    measured = []

    def measure(model):
        measured.append(model.config.num_hidden_layers)
        return measure_shape(model)

    for module in (load, selfcheck):
        monkeypatch.setattr(module, "measure_shape", measure)
    config = Config(model=str(checkpoint), dtype="float32", page_size=4, max_rows=4)
    source = CheckpointSource(checkpoint, "float32", torch.device("cpu"))
    start(config, source, Progress(), BUDGET)
    assert measured[0] == NUM_LAYERS
    assert NUM_LAYERS not in measured[1:]


@pytest.mark.parametrize("gathered_keys", [10, step.MAX_GATHERED_KEYS])
def test_greedy_text_equals_transformers_with_chunks_and_a_second_row(
    plain, checkpoint, monkeypatch, gathered_keys
):
    monkeypatch.setattr(step, "MAX_GATHERED_KEYS", gathered_keys)
    runner = start_worker(checkpoint).runner
    runner.execute(start_plan(0, PROMPT[:9], 0, num_pages=10, is_last=False))
    rest = Extend(0, 9, pack_ids(PROMPT[9:]), True)
    other = start_plan(2, PROMPT[5:12], 20, num_pages=10)
    both = StepPlan(**{**as_dict(other), "extends": (rest, *other.extends)})
    first = tokens_of(runner.execute(both))
    texts = {row: [token] for row, token in first.items()}
    for i in range(9):
        plan = decode_plan({2: 7 + i, 0: len(PROMPT) + i})
        for row, token in tokens_of(runner.execute(plan)).items():
            texts[row].append(token)
    assert texts[0] == expected_text(plain, PROMPT, 10)
    assert texts[2] == expected_text(plain, PROMPT[5:12], 10)


def as_dict(plan):
    return {name: getattr(plan, name) for name in plan.__struct_fields__}


def test_sampling_with_a_seed_is_the_same_in_place_and_through_slots(checkpoint):
    sampling = Sampling(temperature=1.0, top_p=0.9, seed=5)
    texts = []
    for options in ({}, {"experts": "slots", "moe_cache_size": 4}):
        runner = start_worker(checkpoint, **options).runner
        first = tokens_of(runner.execute(start_plan(0, PROMPT, 0, num_pages=12, sampling=sampling)))
        texts.append(decode(runner, 0, len(PROMPT), first[0], 20))
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 5


@pytest.mark.parametrize("num_slots", [1, 5, NUM_LAYERS * NUM_EXPERTS])
@pytest.mark.parametrize("mode", list(StepMode))
def test_text_is_the_same_on_both_sides_of_the_threshold(plain, checkpoint, num_slots, mode):
    runner = start_worker(checkpoint, experts="slots", moe_cache_size=num_slots).runner
    first = tokens_of(runner.execute(start_plan(0, PROMPT, 0, num_pages=12, mode=mode)))
    assert decode(runner, 0, len(PROMPT), first[0], 10) == expected_text(plain, PROMPT, 10)


def test_an_extend_on_a_full_hit_loads_at_most_its_choices_in_each_layer(checkpoint):
    runner = start_worker(checkpoint, experts="slots", moe_cache_size=6).runner
    cached = 16
    runner.execute(start_plan(0, PROMPT[:cached], 0, num_pages=4, mode=StepMode.PASS))
    for k in (1, 2, 4):
        prompt = PROMPT[:cached] + [10 + k] * k
        plan = make_plan(
            forget_rows=pack_ids([1]),
            starts=start_plan(1, prompt, 0).starts,
            page_runs=(PageRun(1, 0, pack_ids([0, 1, 2, 3, 20])),),
            extends=(Extend(1, cached, pack_ids(prompt[cached:]), True),),
        )
        stats = runner.execute(plan).stats
        assert 0 < stats.distinct_experts <= k * TOP_K * NUM_LAYERS
        assert stats.slot_misses <= k * TOP_K * NUM_LAYERS
        assert stats.slot_hits + stats.slot_misses == stats.distinct_experts


@pytest.mark.parametrize("length", [12, 21, 100])
def test_a_pass_loads_each_expert_without_a_slot_once_whatever_its_length(checkpoint, length):
    runner = start_worker(checkpoint, experts="slots", moe_cache_size=5).runner
    prompt = (PROMPT * 5)[:length]
    stats = runner.execute(
        start_plan(0, prompt, 0, num_pages=length // 4 + 1, mode=StepMode.PASS)
    ).stats
    assert stats.slot_hits + stats.slot_misses == NUM_LAYERS * NUM_EXPERTS
    assert stats.slot_misses >= NUM_LAYERS * NUM_EXPERTS - 5
    expert_bytes = stats.expert_bytes / stats.slot_misses
    assert expert_bytes >= 3 * 64 * 32 * 4


def test_a_pass_in_parts_counts_what_it_counts_in_one(checkpoint):
    """The last part has nothing to copy: its experts have set out beside the part before."""
    runner = start_worker(checkpoint, experts="slots", moe_cache_size=5).runner
    options = {"num_pages": 6, "mode": StepMode.PASS, "forget_rows": pack_ids([0])}
    few, many = [PROMPT[0]] * 4, PROMPT
    whole = [runner.execute(start_plan(0, prompt, 0, **options)).stats for prompt in (few, many)]
    assert whole[0].distinct_experts < whole[1].distinct_experts
    for prompt, expected in zip((few, many), whole, strict=True):
        stats = []
        for layer in range(NUM_LAYERS):
            plan = start_plan(0, prompt, 0, **options, layers=(layer, layer + 1))
            if layer:
                extends = (Extend(0, 0, b"", True),)
                plan = make_plan(mode=StepMode.PASS, layers=plan.layers, extends=extends)
            stats.append(runner.execute(plan).stats)
        for name in ("distinct_experts", "slot_hits", "slot_misses", "expert_bytes"):
            assert sum(getattr(part, name) for part in stats) == getattr(expected, name), name


@pytest.mark.parametrize("flags", [{}, {"disable_moe_prefill_overlap": True}])
def test_copies_beside_the_layer_before_can_be_turned_off(checkpoint, monkeypatch, flags):
    overlaps = []

    def make_ring(*args, **options):
        overlaps.append(options["overlaps"])
        return PassRing(*args, **options)

    monkeypatch.setattr(assemble, "PassRing", make_ring)
    source = process.open_source(Config(model=str(checkpoint), device="cpu", **flags))
    source.load("slots", 4, 64, lambda what, done, total: None)
    assert overlaps == [not flags]


def test_rope_that_grows_with_the_context_is_refused_beyond_its_window(tmp_path):
    config = tiny.make_config("llama")
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    tiny.save(tiny.make_model(config), tmp_path)
    longer = {"max_seq_len_override": 512, "num_tokens": 512}
    with pytest.raises(
        EngineError, match=r"cannot serve 512 .* ask for a smaller context or KV pool"
    ):
        start_worker(tmp_path, **longer)
    assert start_worker(tmp_path, **longer | {"num_tokens": 256}).ready.context_tokens == 256


def test_the_model_is_checked_in_the_type_that_is_served(checkpoint, monkeypatch):
    seen = []
    monkeypatch.setattr(subject, "check_model", lambda path, **options: seen.append(options))
    CheckpointSource(checkpoint, "float16", torch.device("cpu")).check("slots")
    assert seen == [{"experts": "slots", "dtype": "float16", "device": "cpu"}]


def test_the_threshold_is_announced_with_slots_only(checkpoint):
    assert start_worker(checkpoint).ready.max_on_demand_tokens is None
    slots = {"experts": "slots", "moe_cache_size": 4}
    assert start_worker(checkpoint, **slots).ready.max_on_demand_tokens == 8
    with pytest.raises(ConfigError, match=r"--extend-threshold 5 .* need --experts slots"):
        start_worker(checkpoint, extend_threshold=5)
    given = start_worker(checkpoint, extend_threshold=0, **slots).ready
    assert given.max_on_demand_tokens == 0
    assert given.max_pass_tokens > given.max_step_tokens


@pytest.mark.parametrize(
    ("pool", "flag"),
    [
        ({"num_tokens": 128}, "--num-tokens 256"),
        ({"num_pages": 32}, "--num-pages 64"),
    ],
)
def test_a_window_that_does_not_fit_the_pool_is_warned_of_with_the_flag(
    checkpoint, caplog, pool, flag
):
    logger = logging.getLogger("freetoken")
    was, logger.propagate = logger.propagate, True
    try:
        with caplog.at_level(logging.INFO, "freetoken"):
            started = start_worker(checkpoint, **pool)
    finally:
        logger.propagate = was
    lines = [record for record in caplog.records if "effective KV context" in record.message]
    assert [line.levelname for line in lines] == ["WARNING"]
    assert "128 tokens (reserve 128, window 256, resident experts 100 %)" in lines[0].message
    assert lines[0].message.endswith(f"; {flag} uses the whole window")
    assert started.ready.context_tokens == 128
    assert started.ready.context_flag == flag.split()[0]
    text = "\n".join(record.message for record in caplog.records)
    assert "requested" in text
    assert next(f"{name}={value}" for name, value in pool.items()) in text
    assert "resolved moe_cache_size=0 num_pages=32 page_size=4" in text


@pytest.mark.parametrize("experts", ["in-place", "slots"])
def test_the_self_check_passes_for_a_supported_class(checkpoint, experts):
    CheckpointSource(checkpoint, "auto", torch.device("cpu")).check(experts)


def test_the_self_check_runs_in_the_type_that_is_served(checkpoint, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "freetoken.worker.checkpoint.check_model", lambda path, **options: asked.append(options)
    )
    CheckpointSource(checkpoint, "bfloat16", torch.device("cpu")).check("in-place")
    assert asked == [{"experts": "in-place", "dtype": "bfloat16", "device": "cpu"}]


def test_rope_that_would_change_beyond_the_model_s_window_is_refused(tmp_path):
    config = tiny.make_config("llama")
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    config.max_position_embeddings = 32
    path = tiny.save(tiny.make_model(config), tmp_path)
    assert start_worker(path).ready.context_tokens == 32
    with pytest.raises(EngineError, match="dynamic cannot serve 64 tokens"):
        start_worker(path, max_seq_len_override=64)


def test_a_directory_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        CheckpointSource(tmp_path, "auto", torch.device("cpu"))
