"""What steps and passes cost, against figures worked out by hand."""

from __future__ import annotations

import pytest

from freetoken.experts.cost import (
    LRU_STACK,
    Link,
    Machine,
    Routed,
    Work,
    decode_tokens_s,
    distinct_uniform,
    hit_rate_lru_stack,
    on_demand_s,
    pass_s,
    prompt_operations,
    prompt_s,
    resident_step_s,
)

ROUTED = Routed(num_layers=16, num_experts=128, top_k=8, expert_bytes=9 << 20)
LINK = Link(copy_bytes_s=55.5e9, gather_bytes_s=51e9)
H200 = Machine(LINK, vram_bytes_s=3e12, operations_s=650e12)
WORK = Work(
    routed=ROUTED,
    dense_bytes=16 * 38_000_000 + 622_000_000,
    head_bytes=622_000_000,
    kv_token_bytes=16 * 2048,
    query_width=4096,
    num_attention_layers=16,
    element_bytes=2,
)


def test_one_token_asks_for_its_k_experts_and_many_for_all():
    assert distinct_uniform(ROUTED, 1) == pytest.approx(8)
    assert distinct_uniform(ROUTED, 16) == pytest.approx(0.64 * 128, rel=0.01)
    assert distinct_uniform(ROUTED, 10_000) == pytest.approx(128)
    assert distinct_uniform(Routed(0, 0, 0, 0), 5) == 0


def test_the_lru_stack_goes_through_its_figures_and_rises_between_them():
    for share, rate in LRU_STACK:
        assert hit_rate_lru_stack(share) == pytest.approx(rate)
    rates = [hit_rate_lru_stack(i / 100) for i in range(101)]
    assert rates == sorted(rates)
    assert (rates[0], rates[-1]) == (0.0, 1.0)


def test_on_demand_pays_for_what_misses_and_a_pass_for_all_that_misses():
    found = on_demand_s(ROUTED, LINK, 0.5, distinct=8, resident_s=0.0015)
    assert found == pytest.approx(0.0015 + 16 * 4 * (9 << 20) / 51e9)
    # 19.3 GB of experts, half resident: 174 ms of link.
    assert pass_s(ROUTED, LINK, 0.5, compute_s=0.1) == pytest.approx(0.174, rel=0.01)
    assert pass_s(ROUTED, LINK, 0.5, compute_s=0.35) == 0.35
    assert pass_s(ROUTED, LINK, 1.0, compute_s=0.01) == 0.01


def test_predictions_meet_what_an_h200_does():
    assert 0.0010 < resident_step_s(WORK, H200, 2048) < 0.0020
    assert prompt_s(WORK, H200, 0.5, 8192, 32768) == pytest.approx(0.174, rel=0.01)
    # About 22 ms of arithmetic a layer for 32768 tokens.
    assert 16 * 0.015 < prompt_s(WORK, H200, 0.5, 32768, 32768) < 16 * 0.024
    longer = prompt_s(WORK, H200, 0.5, 65536, 32768)
    assert longer == pytest.approx(prompt_operations(WORK, 65536) / 650e12)


def test_misses_cost_tokens_per_second():
    speeds = [decode_tokens_s(WORK, H200, rate, 4096) for rate in (0.0, 0.5, 0.9, 1.0)]
    assert speeds == sorted(speeds)
    assert 1 / speeds[-1] == pytest.approx(resident_step_s(WORK, H200, 4096))
    assert 1 / speeds[0] - 1 / speeds[-1] == pytest.approx(16 * 8 * (9 << 20) / 51e9)


def test_a_link_of_which_only_copies_are_known_gathers_a_little_slower():
    assert Link.of_copy(100.0) == Link(100.0, 92.0)
