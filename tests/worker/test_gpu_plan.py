"""The memory plan on GPUs: published models on real cards, and any model on any budget."""

from __future__ import annotations

import contextlib
import dataclasses
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.config import Config
from freetoken.errors import ConfigError
from freetoken.worker.budget import budget_of, card_budget_of
from freetoken.worker.memory import (
    GPU_STEP_TOKENS,
    Memory,
    ShortfallError,
    plan_memory,
)
from freetoken.worker.prices import HOST_PROCESS_BYTES, STANDBY_BYTES, price_fixed
from freetoken.worker.sizes import ModelSizes, Request, make_request
from tests.planned import gpu_sizes

MIB = 1 << 20
GIB = 1 << 30
MODELS = ("qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-120b", "glm-4.5-air")
LONG = {"context_tokens": 262_144, "max_seq_len_override": 262_144}


def plan_on(card_gib, name, host_gib=None, **options):
    sizes = gpu_sizes(name)
    request = make_request(Config(**options), sizes, has_slots=True)
    host = None if host_gib is None else budget_of(host_gib * GIB)
    return plan_memory(sizes, request, card_budget_of(card_gib * GIB), host)


# ---------------------------------------------------------------- published models


@pytest.mark.parametrize(
    ("name", "expert_mib", "bank_gib", "kv_token_bytes"),
    [
        ("qwen3-30b-a3b", 9, 54, 98_304),
        ("qwen3-235b-a22b", 36, 423, 192_512),
        ("glm-4.5-air", 33, 185.625, 188_416),
    ],
)
def test_sizes_are_those_of_the_published_models(name, expert_mib, bank_gib, kv_token_bytes):
    sizes = gpu_sizes(name)
    assert sizes.expert_bytes == expert_mib * MIB
    assert sizes.bank_bytes == bank_gib * GIB
    assert sizes.kv_token_bytes() == kv_token_bytes


def test_biases_count_among_an_experts_bytes():
    sizes = gpu_sizes("gpt-oss-120b")
    biases = 2 * 3 * 2880
    assert 0 <= sizes.expert_bytes - (2 * 3 * 2880 * 2880 + biases) < 4 * 256


@pytest.mark.parametrize("name", MODELS)
def test_a_card_of_96_gb_serves_a_usual_context_by_default_and_a_long_one_when_asked(name):
    plan = plan_on(96, name)
    sizes = gpu_sizes(name)
    assert plan.context_tokens >= 32768
    assert plan.num_slots >= 2 * sizes.top_k * sizes.num_moe_layers or plan.resident_rate > 0.08
    assert plan.max_pass_tokens >= 32768
    assert plan_on(96, name, **LONG).context_tokens == 262_144


def test_a_card_of_24_gb_serves_qwen3_30b_in_bf16_with_passes_of_32k_tokens():
    plan = plan_on(24, "qwen3-30b-a3b", host_gib=64)
    assert plan.context_tokens >= 32768
    assert plan.max_pass_tokens >= 32768
    assert plan.max_step_tokens >= 2048
    assert plan.num_slots >= 2 * 8 * 48
    assert plan.prices["ring"] == 2 * 128 * 9 * MIB
    assert plan.prices["scratch"] == 128 * 9 * MIB
    assert plan.prices["slots"] == plan.num_slots * 9 * MIB
    assert plan.prices["kv"] == (plan.num_pages + 1) * 16 * 98_304
    assert plan.host_prices == {"banks": 54 * GIB, "process": HOST_PROCESS_BYTES}
    assert "experts" not in plan.prices, "the banks are not in the GPU's memory"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3-30b-a3b", LONG),
        ("qwen3-235b-a22b", {}),
        ("gpt-oss-120b", {}),
        ("glm-4.5-air", {}),
    ],
)
def test_what_a_card_of_24_gb_cannot_do_is_refused_with_the_arithmetic(name, options):
    with pytest.raises(ShortfallError) as refused:
        plan_on(24, name, **options)
    assert refused.value.memory is Memory.GPU
    assert refused.value.short_bytes > 0
    text = str(refused.value)
    for word in ("weights ", "ring ", "scratch ", "kv ", "of GPU memory", "short; use a larger"):
        assert word in text
    assert ("262144 tokens" in text) == bool(options)


def test_banks_that_do_not_fit_the_host_are_refused_with_the_arithmetic():
    with pytest.raises(ShortfallError) as refused:
        plan_on(96, "qwen3-30b-a3b", host_gib=48)
    assert refused.value.memory is Memory.HOST
    short = 54 * GIB + HOST_PROCESS_BYTES - budget_of(48 * GIB)
    assert refused.value.short_bytes == short
    assert "banks 55296 MiB + process 2048 MiB = 57344 MiB of host memory" in str(refused.value)


def test_a_worker_that_stands_by_takes_host_memory_on_either_device():
    plan = plan_on(96, "qwen3-30b-a3b", host_gib=64, worker_restarts=1)
    assert plan.host_bytes == 54 * GIB + HOST_PROCESS_BYTES + STANDBY_BYTES
    assert plan.prices == plan_on(96, "qwen3-30b-a3b", host_gib=64).prices
    exactly = plan.host_bytes
    sizes = gpu_sizes("qwen3-30b-a3b")
    request = make_request(Config(worker_restarts=3), sizes, has_slots=True)
    plan_memory(sizes, request, 90 * GIB, exactly)
    with pytest.raises(ShortfallError, match=r"standby 512 MiB .* 1 MiB short.* leave --worker-r"):
        plan_memory(sizes, request, 90 * GIB, exactly - 1)
    on_cpu = dataclasses.replace(sizes, on_gpu=False)
    plan = plan_memory(on_cpu, request, 90 * GIB)
    alone = plan_memory(on_cpu, dataclasses.replace(request, has_standby=False), 90 * GIB)
    assert plan.prices["standby"] == STANDBY_BYTES
    assert "standby" not in alone.prices
    assert plan.planned_bytes <= 90 * GIB


def test_when_all_experts_are_resident_the_rest_is_for_the_context():
    plan = plan_on(96, "qwen3-30b-a3b", max_seq_len_override=262_144)
    assert plan.resident_rate == 1
    assert plan.context_tokens == 262_144
    assert plan.budget_bytes - plan.planned_bytes < plan.page_bytes * 2
    roomy = plan_on(600, "qwen3-30b-a3b")
    assert roomy.num_pages * 16 == 32 * 40960, "a whole window for each row, and no more"


def test_a_model_without_experts_gives_the_rest_to_the_context_and_has_passes():
    dense = dataclasses.replace(
        gpu_sizes("qwen3-30b-a3b"), num_moe_layers=0, num_experts=0, top_k=0, expert_bytes=0
    )
    plan = plan_memory(dense, Request(page_size=16, max_rows=32), 20 * GIB)
    assert (plan.num_slots, plan.resident_rate) == (0, 1.0)
    assert "ring" not in plan.prices
    assert plan.budget_bytes - plan.planned_bytes < 2 * plan.page_bytes
    assert plan.max_pass_tokens >= 32768


def test_experts_in_place_are_refused_on_a_gpu():
    with pytest.raises(ConfigError, match="--experts in-place"):
        plan_memory(gpu_sizes("qwen3-30b-a3b"), Request(page_size=16, max_rows=32), 90 * GIB)


def test_the_chunk_follows_the_budget_and_a_given_one_is_taken():
    chunks = [plan_on(gib, "qwen3-30b-a3b").max_step_tokens for gib in (16, 24, 48, 96)]
    assert chunks == sorted(chunks)
    assert chunks[-1] == GPU_STEP_TOKENS[0]
    assert plan_on(24, "qwen3-30b-a3b", max_step_tokens=777).max_step_tokens == 777
    assert plan_on(24, "qwen3-30b-a3b", max_step_tokens=100).max_on_demand_tokens == 100
    assert plan_on(24, "qwen3-30b-a3b").max_on_demand_tokens == 256


@pytest.mark.parametrize("name", MODELS)
def test_no_chunk_is_smaller_than_one_that_takes_as_little(name):
    sizes = gpu_sizes(name)
    request = make_request(Config(), sizes, has_slots=True)
    for gib in (24, 32, 40, 48, 64, 80, 96):
        with contextlib.suppress(ShortfallError):
            plan = plan_memory(sizes, request, card_budget_of(gib * GIB))
            for tokens in (n for n in GPU_STEP_TOKENS if n > plan.max_step_tokens):
                prices = price_fixed(sizes, request, tokens)
                assert prices["activations"] > plan.prices["activations"], (gib, tokens)


def test_a_small_chunk_is_taken_before_a_flag_is_refused():
    def plan_with(context, **changes):
        options = {"context_tokens": context, "max_seq_len_override": context}
        return plan_on(24, "qwen3-30b-a3b", **options, **changes)

    largest = max(tokens for tokens in range(100_000, 200_000, 1000) if fits(plan_with, tokens))
    assert plan_with(largest).max_step_tokens < plan_on(24, "qwen3-30b-a3b").max_step_tokens


def fits(plan_with, tokens):
    try:
        plan_with(tokens)
    except ShortfallError:
        return False
    return True


# ---------------------------------------------------------------- any model, any budget

SMALL = ModelSizes(
    window=1000,
    kv_widths=(64, 64),
    element_bytes=2,
    vocab_size=100,
    hidden_size=8,
    query_width=32,
    ffn_width=16,
    expert_width=4,
    num_moe_layers=2,
    num_experts=8,
    top_k=2,
    expert_bytes=8192,
    dense_bytes=100_000,
    max_gathered_keys=0,
    max_scores=0,
    library_bytes=0,
    on_gpu=True,
    head_size=2,
)

flags = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 16, 64]),
        "max_rows": st.integers(1, 64),
    },
    optional={
        "max_step_tokens": st.integers(1, 600),
        "context_tokens": st.integers(2, 1000),
        "num_pages": st.integers(16, 2000),
        "kv_reserve_tokens": st.integers(1, 3000),
        "max_seq_len_override": st.integers(1000, 4000),
        "moe_cache_size": st.integers(1, 20),
    },
)


def is_consistent(asked):
    pool = asked.num_pages * asked.page_size if asked.num_pages else 10**9
    return max(asked.context_tokens or 2, asked.kv_reserve_tokens or 0) <= pool


budgets = st.integers(0, 24 * MIB)


@settings(max_examples=500, deadline=None)
@given(flags, budgets)
def test_any_budget_gives_a_plan_that_holds_or_a_shortfall_that_says_by_how_much(given, budget):
    asked = Request(**given, has_slots=True)
    if not is_consistent(asked):
        with pytest.raises(ConfigError):
            plan_memory(SMALL, asked, budget)
        return
    try:
        plan = plan_memory(SMALL, asked, budget)
    except ShortfallError as shortfall:
        check_shortfall(asked, budget, shortfall.short_bytes)
        return
    check_flags_are_honoured(asked, plan)
    assert plan.planned_bytes == sum(plan.prices.values()) <= budget
    assert plan.prices["kv"] == (plan.num_pages + 1) * plan.page_bytes
    assert plan.prices["slots"] == plan.num_slots * SMALL.expert_bytes
    assert plan.context_tokens == min(plan.window, plan.num_pages * plan.page_size)
    assert plan.max_pass_tokens >= 32768


def check_flags_are_honoured(asked, plan):
    usable = plan.num_pages * plan.page_size
    assert plan.context_tokens >= (asked.context_tokens or 2)
    assert usable >= (asked.kv_reserve_tokens or 1)
    assert asked.num_pages in (None, plan.num_pages)
    assert asked.max_step_tokens in (None, plan.max_step_tokens)
    if asked.moe_cache_size is None:
        assert 1 <= plan.num_slots <= 16
    else:
        assert plan.num_slots == min(asked.moe_cache_size, 16)


def check_shortfall(asked, budget, short_bytes):
    """With so many bytes more there is a plan, and with one less there is none."""
    assert short_bytes > 0
    assert plan_memory(SMALL, asked, budget + short_bytes).planned_bytes <= budget + short_bytes
    with pytest.raises(ShortfallError):
        plan_memory(SMALL, asked, budget + short_bytes - 1)


@settings(max_examples=300, deadline=None)
@given(flags, budgets, st.integers(1, 4 * MIB))
def test_a_larger_budget_never_gives_less(given, budget, more):
    """The chunk fixed: a larger one is bought with the memory that a larger budget brings."""
    asked = Request(**({"max_step_tokens": 512} | given), has_slots=True)
    if not is_consistent(asked):
        return
    try:
        plan = plan_memory(SMALL, asked, budget)
    except ShortfallError:
        return
    larger = plan_memory(SMALL, asked, budget + more)
    assert larger.context_tokens >= plan.context_tokens
    # The pool is raised to a usual context as soon as the least slots remain beside it.
    assert larger.num_slots >= plan.num_slots or larger.num_pages > plan.num_pages


@settings(max_examples=250, deadline=None)
@given(st.integers(0, 200), st.integers(1, 100), st.sampled_from(MODELS))
def test_what_fits_a_card_fits_a_larger_one(gib, more, name):
    asked = make_request(Config(), gpu_sizes(name), has_slots=True)
    try:
        plan_memory(gpu_sizes(name), asked, gib * GIB)
    except ShortfallError:
        return
    plan_memory(gpu_sizes(name), asked, (gib + more) * GIB)


def test_ten_thousand_budgets_reach_what_was_asked_for_or_are_refused():
    random = Random(5)
    num_plans = 0
    for _ in range(10_000):
        sizes = gpu_sizes(random.choice(MODELS))
        context = random.choice([None, 200, 8760, 32_768, 100_000, 262_144])
        asked = make_request(
            Config(
                context_tokens=context,
                max_seq_len_override=262_144,
                page_size=random.choice([1, 16, 64]),
                moe_cache_size=random.choice([None, None, 1, 500, 5000]),
            ),
            sizes,
            has_slots=True,
        )
        budget = random.randrange(400 * GIB)
        try:
            plan = plan_memory(sizes, asked, budget)
        except ShortfallError:
            continue
        num_plans += 1
        assert plan.planned_bytes <= budget
        assert plan.context_tokens >= (context or 2)
    assert 5000 < num_plans < 10_000
