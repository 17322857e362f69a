"""What the plan prices is what others take: constants of which the torch-free plan has a copy."""

from __future__ import annotations

from freetoken.experts import slots, stream
from freetoken.model import device_attention
from freetoken.worker import gpu_activations, graphs, prices


def test_the_plan_knows_the_ring_and_the_tables() -> None:
    assert prices.RING_LAYERS == stream.HALVES
    assert prices.MIN_PAIRS == slots.MIN_PAIRS


def test_the_plan_knows_the_graphs() -> None:
    assert graphs.BUCKETS[-1] == gpu_activations.MAX_ON_DEMAND_TOKENS
    assert len(graphs.BUCKETS) <= gpu_activations.NUM_GRAPHS


def test_the_plan_knows_the_rows_of_a_pass() -> None:
    assert gpu_activations.MAX_KEPT_ROWS == device_attention.MAX_KEPT_ROWS
