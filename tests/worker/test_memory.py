"""The memory plan: sums, hard flags, refusals with arithmetic, and what is planned by itself."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.errors import ConfigError
from freetoken.worker.memory import DEFAULT_CONTEXT_TOKENS, ShortfallError, plan_memory
from freetoken.worker.sizes import ModelSizes, Request

MIB = 1 << 20
GIB = 1 << 30

QWEN_30B = ModelSizes(
    window=262_144,
    kv_widths=(4 * 256,) * 48,
    element_bytes=2,
    vocab_size=151_936,
    hidden_size=2048,
    query_width=4096,
    ffn_width=6144,
    expert_width=768,
    num_moe_layers=48,
    num_experts=128,
    top_k=8,
    expert_bytes=3 * 2048 * 768 * 2,
    dense_bytes=3 * GIB,
    max_gathered_keys=1000,
    max_scores=0,
    library_bytes=0,
)
SMALL = dataclasses.replace(
    QWEN_30B,
    window=1000,
    kv_widths=(64, 64),
    vocab_size=100,
    hidden_size=32,
    query_width=32,
    ffn_width=64,
    expert_width=16,
    num_moe_layers=2,
    num_experts=8,
    top_k=2,
    expert_bytes=3 * 32 * 16 * 2,
    dense_bytes=100_000,
)


def request(**changes):
    values = {"page_size": 16, "max_rows": 8, "max_step_tokens": 64} | changes
    return Request(**values)


def test_the_prices_sum_up_within_the_budget():
    plan = plan_memory(SMALL, request(), GIB)
    assert plan.planned_bytes == sum(plan.prices.values()) <= GIB
    assert plan.prices["kv"] == (plan.num_pages + 1) * 16 * 128 * 2, "with the sentinel page"
    assert plan.prices["experts"] == 2 * 8 * SMALL.expert_bytes
    assert plan.prices["weights"] == 100_000


flags = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 16, 64]),
        "max_rows": st.integers(1, 64),
        "max_step_tokens": st.integers(1, 600),
        "has_slots": st.booleans(),
    },
    optional={
        "context_tokens": st.integers(2, 1200),
        "num_pages": st.integers(1, 200),
        "kv_reserve_tokens": st.integers(1, 3000),
        "max_seq_len_override": st.integers(2, 4000),
        "moe_cache_size": st.integers(1, 20),
        "automatic_pool_tokens": st.integers(1, 5000),
    },
)


@settings(max_examples=1000, deadline=None)
@given(flags, st.integers(0, 8 * MIB))
def test_any_budget_gives_a_plan_that_holds_or_a_shortfall_that_says_by_how_much(
    given_flags, budget
):
    asked = Request(**given_flags)
    try:
        plan = plan_memory(SMALL, asked, budget)
    except ShortfallError as shortfall:
        check_shortfall(asked, budget, shortfall.short_bytes)
        return
    except ConfigError:
        assert contradicts(asked)
        return
    assert not contradicts(asked)
    assert plan.planned_bytes <= budget
    usable = plan.num_pages * plan.page_size
    assert plan.context_tokens == min(plan.window, usable)
    assert plan.context_tokens >= (asked.context_tokens or 2)
    assert usable >= (asked.kv_reserve_tokens or 1)
    assert asked.num_pages in (None, plan.num_pages)
    if asked.moe_cache_size:
        assert plan.num_slots == min(asked.moe_cache_size, 16)
    if asked.has_slots:
        assert 1 <= plan.num_slots <= 16
        assert plan.prices["slots"] == plan.num_slots * SMALL.expert_bytes


def check_shortfall(asked, budget, short_bytes):
    """With so many bytes more there is a plan, and with one less there is none."""
    assert short_bytes > 0
    plan = plan_memory(SMALL, asked, budget + short_bytes)
    assert plan.planned_bytes <= budget + short_bytes
    with pytest.raises(ShortfallError):
        plan_memory(SMALL, asked, budget + short_bytes - 1)


def contradicts(asked):
    window = asked.max_seq_len_override or SMALL.window
    pool = asked.num_pages * asked.page_size if asked.num_pages else 10**9
    return (
        (asked.context_tokens or 0) > window
        or max(asked.context_tokens or 2, asked.kv_reserve_tokens or 0) > pool
        or (asked.moe_cache_size is not None and not asked.has_slots)
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_pages": 4, "num_tokens": 64}, ["--num-tokens 64", "--num-pages 4"]),
        ({"num_pages": 1, "page_size": 1}, ["--num-pages 1 ", "pool of 1 token", "has 2"]),
        ({"num_tokens": 100}, ["--num-tokens 100", "--page-size 16", "96 or 112"]),
        ({"num_tokens": 7}, ["--num-tokens 7", "nearest are 16"]),
        ({"context_tokens": 1001}, ["--context-tokens 1001", "1000", "--max-seq-len-override"]),
        ({"context_tokens": 500, "num_tokens": 160}, ["--context-tokens 500", "160 tokens"]),
        ({"kv_reserve_tokens": 500, "num_pages": 10}, ["--kv-reserve-tokens 500", "--num-pages"]),
        ({"moe_cache_size": 5}, ["--moe-cache-size 5", "--experts slots"]),
        (
            {"moe_cache_size": 5, "moe_cache_rate": 0.5, "has_slots": True},
            ["--moe-cache-size 5", "--moe-cache-rate 0.5"],
        ),
    ],
    ids=str,
)
def test_contradictions_are_refused_with_the_numbers(changes, words):
    with pytest.raises(ConfigError) as refused:
        plan_memory(SMALL, request(**changes), GIB)
    assert not isinstance(refused.value, ShortfallError)
    for word in words:
        assert word in str(refused.value)


def test_slots_for_a_model_without_experts_are_refused():
    dense = dataclasses.replace(SMALL, num_moe_layers=0, num_experts=0, top_k=0, expert_bytes=0)
    assert plan_memory(dense, request(), GIB).resident_rate == 1
    with pytest.raises(ConfigError, match="no routed experts"):
        plan_memory(dense, request(has_slots=True), GIB)


def test_a_shortfall_names_every_part_and_the_remedy():
    with pytest.raises(ShortfallError) as refused:
        plan_memory(QWEN_30B, request(context_tokens=100_000), 8 * GIB)
    text = str(refused.value)
    for word in ("weights 3072 MiB", "experts 55296 MiB", "100000 tokens", "8192 MiB", "short"):
        assert word in text


def test_the_window_override_sets_the_window():
    plan = plan_memory(SMALL, request(max_seq_len_override=200), GIB)
    assert (plan.window, plan.context_tokens) == (200, 200)


def test_a_pool_smaller_than_the_window_bounds_the_context():
    plan = plan_memory(SMALL, request(num_tokens=128), GIB)
    assert (plan.num_pages, plan.context_tokens, plan.window) == (8, 128, 1000)


def test_the_automatic_pool_holds_a_usual_context_even_beyond_a_third():
    fixed = 60 * GIB  # weights and experts take 57 GiB
    plan = plan_memory(QWEN_30B, request(), fixed + 5 * GIB)
    assert plan.context_tokens >= DEFAULT_CONTEXT_TOKENS
    roomy = plan_memory(QWEN_30B, request(), fixed + 60 * GIB)
    kv = roomy.prices["kv"] + roomy.prices["kv_reach"]
    assert 0.3 < kv / (63 * GIB) < 0.34, "a third of what is left"


def test_the_automatic_pool_is_no_larger_than_it_is_of_use():
    plan = plan_memory(SMALL, request(automatic_pool_tokens=4000), 64 * GIB)
    assert plan.num_pages == 250


def test_automatic_slots_take_what_is_left_up_to_all_experts():
    rich = plan_memory(QWEN_30B, request(has_slots=True), 400 * GIB)
    assert rich.num_slots == 48 * 128
    assert rich.resident_rate == 1
    poor = plan_memory(QWEN_30B, request(has_slots=True), 80 * GIB)
    assert 0.1 < poor.resident_rate < 1
    free = 80 * GIB - poor.planned_bytes
    assert 0 <= free < QWEN_30B.expert_bytes


def test_a_usual_context_may_take_more_than_a_third_but_not_the_last_slots():
    sizes = dataclasses.replace(QWEN_30B, top_k=2)
    two_choices = 2 * 2 * 48
    fixed = plan_memory(sizes, request(has_slots=True, moe_cache_size=1, num_pages=1), 1 << 40)

    def plan_with(left):
        return plan_memory(sizes, request(has_slots=True), fixed.planned_bytes + left)

    enough = plan_with(6 * GIB)
    assert enough.context_tokens == DEFAULT_CONTEXT_TOKENS
    assert enough.prices["kv"] > 2 * GIB
    assert enough.num_slots >= two_choices
    scarce = plan_with(4 * GIB)
    assert scarce.prices["kv"] > GIB
    assert scarce.context_tokens < DEFAULT_CONTEXT_TOKENS
    assert two_choices <= scarce.num_slots < two_choices + 2


def test_slots_as_a_rate_are_a_share_of_all_experts():
    plan = plan_memory(SMALL, request(has_slots=True, moe_cache_rate=0.25), GIB)
    assert (plan.num_slots, plan.resident_rate) == (4, 0.25)
