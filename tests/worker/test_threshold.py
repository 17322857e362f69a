"""How many tokens a step on demand may bring: the rule, and what observation does to it."""

from __future__ import annotations

import pytest

from freetoken.experts.cost import Link, Routed, distinct_uniform
from freetoken.worker.threshold import (
    GATHER_RATE,
    MIN_OBSERVATIONS,
    REFRESH_STEPS,
    Threshold,
    on_demand_tokens,
)

ROUTED = Routed(num_layers=16, num_experts=128, top_k=8, expert_bytes=9 << 20)
LINK = Link(copy_bytes_s=55.5e9, gather_bytes_s=51e9)


def make(option="auto", routed=ROUTED, link=LINK, resident_rate=0.25, max_tokens=256):
    return Threshold(option, routed, link, resident_rate, max_tokens)


# ---------------------------------------------------------------- on a CPU


@pytest.mark.parametrize("option", [0, 1, 500])
def test_a_given_number_is_used(option):
    assert on_demand_tokens(option, 128, 8) == option


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (256, 8), (512, 10), (8, 2)])
def test_auto_is_the_last_number_whose_experts_cost_less_than_all(num_experts, top_k):
    def asked_share(tokens):
        return 1 - (1 - top_k / num_experts) ** tokens

    tokens = on_demand_tokens("auto", num_experts, top_k)
    assert asked_share(tokens) <= GATHER_RATE < asked_share(tokens + 1)


@pytest.mark.parametrize(("num_experts", "top_k"), [(2, 2), (4, 4)])
def test_auto_with_every_expert_in_use_is_one_token(num_experts, top_k):
    assert on_demand_tokens("auto", num_experts, top_k) == 1


# ---------------------------------------------------------------- on a GPU


@pytest.mark.parametrize("option", [0, 7, 256])
def test_a_number_stays_whatever_is_observed(option):
    threshold = make(option)
    assert threshold.tokens == option
    for _ in range(5 * REFRESH_STEPS):
        threshold.observe(1, 128, is_pass=False, step_s=0.002, num_bytes=0)
    assert threshold.tokens == option


def test_a_number_beyond_the_largest_step_on_demand_means_that_step():
    assert make(5000).tokens == 256


@pytest.mark.parametrize(
    ("num_experts", "top_k", "most"), [(128, 8, 37), (256, 8, 74), (512, 10, 120), (8, 2, 9)]
)
def test_with_nothing_resident_uniform_routing_gives_the_known_limits(num_experts, top_k, most):
    routed = Routed(16, num_experts, top_k, 64 << 20)
    link = Link.of_copy(5e9)  # so slow that nothing else counts
    threshold = make(routed=routed, link=link, resident_rate=0.0)
    assert threshold.tokens == pytest.approx(most, rel=0.12)


def test_it_is_the_last_number_of_tokens_that_is_cheaper_on_demand():
    threshold = make()
    tokens = threshold.tokens
    assert 1 < tokens < 256
    assert threshold.on_demand_s(tokens) <= threshold.pass_s(tokens)
    assert threshold.on_demand_s(tokens + 1) > threshold.pass_s(tokens + 1)


def test_with_everything_resident_all_small_steps_are_on_demand():
    assert make(resident_rate=1.0).tokens == 256
    assert make(resident_rate=1.0, max_tokens=100).tokens == 100
    assert make(max_tokens=1).tokens == 1


def test_a_model_without_experts_is_always_on_demand():
    threshold = make(routed=Routed(0, 0, 0, 0), resident_rate=1.0)
    assert threshold.tokens == 256
    threshold.observe(5, 0, is_pass=False, step_s=0.01, num_bytes=0)


def test_every_expert_in_use_is_still_one_token():
    everything = Routed(16, 4, 4, 64 << 20)
    assert make(routed=everything, link=Link(5e9, 2e9), resident_rate=0.0).tokens == 1


def observe(threshold, num_tokens, count=4 * REFRESH_STEPS, *, share=1.0, resident_s=None):
    """On-demand steps whose tokens ask for `share` of what uniform routing would."""
    distinct = int(16 * share * distinct_uniform(ROUTED, num_tokens))
    num_bytes = distinct * ROUTED.expert_bytes
    resident_s = 0.002 if resident_s is None else resident_s
    step_s = resident_s + num_bytes / LINK.gather_bytes_s
    for _ in range(count):
        threshold.observe(num_tokens, distinct, is_pass=False, step_s=step_s, num_bytes=num_bytes)


def test_tokens_that_share_experts_raise_it():
    threshold = make()
    before = threshold.tokens
    observe(threshold, 16, share=0.47)
    assert threshold.distinct(16) == pytest.approx(0.47 * distinct_uniform(ROUTED, 16), rel=0.02)
    assert threshold.tokens > 2 * before


def test_a_pass_tells_how_many_experts_its_tokens_share():
    threshold = make()
    distinct = int(16 * 0.3 * distinct_uniform(ROUTED, 64))
    for _ in range(REFRESH_STEPS):
        threshold.observe(64, distinct, is_pass=True, step_s=0.3, num_bytes=14 << 30)
    assert threshold.distinct(64) == pytest.approx(0.3 * distinct_uniform(ROUTED, 64), rel=0.02)


def test_slow_arithmetic_of_passes_raises_it_and_of_wide_steps_lowers_it():
    slow_passes = make()
    for _ in range(REFRESH_STEPS):
        slow_passes.observe(64, 2000, is_pass=True, step_s=1.0, num_bytes=14 << 30)
    assert slow_passes.tokens > make().tokens
    slow_steps = make(resident_rate=0.9)
    observe(slow_steps, 12, resident_s=0.5)
    assert slow_steps.tokens < make(resident_rate=0.9).tokens


def test_a_few_slow_first_steps_change_nothing():
    threshold = make()
    expected = threshold.on_demand_s(32)
    for _ in range(MIN_OBSERVATIONS - 1):
        distinct = round(16 * distinct_uniform(ROUTED, 32))
        threshold.observe(32, distinct, is_pass=False, step_s=30.0, num_bytes=0)
    assert threshold.on_demand_s(32) == pytest.approx(expected, rel=0.01)
    observe(threshold, 32, count=1, resident_s=0.002)
    assert threshold.on_demand_s(32) < expected


def test_it_changes_at_the_end_of_a_round_only():
    threshold = make()
    before = threshold.tokens
    observe(threshold, 16, count=REFRESH_STEPS - 1, share=0.3)
    assert threshold.tokens == before
    observe(threshold, 16, count=1, share=0.3)
    assert threshold.tokens != before


def test_the_log_names_the_value_and_what_it_is_made_from():
    found = make().describe()
    assert found["extend_threshold"] == make().tokens
    assert (found["copy_gb_s"], found["gather_gb_s"], found["resident_rate"]) == (55.5, 51.0, 0.25)
    assert found["on_demand_ms"] <= found["pass_ms"]
    assert make(0).describe()["extend_threshold"] == 0
