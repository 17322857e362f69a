"""The rule of thumb for how many tokens a step on demand may bring."""

from __future__ import annotations

import pytest

from freetoken.worker.threshold import GATHER_RATE, on_demand_tokens


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
