"""The launch table: within every card's limits, whatever the model's shape."""

from __future__ import annotations

import itertools

import pytest

from freetoken.kernels.expert_launches import (
    SHARED_BYTES,
    Launch,
    Work,
    candidate_launches,
    choose_down,
    choose_up,
)

# (experts, experts a token, inputs, outputs), from a toy to Mixtral and DeepSeek.
SHAPES = [(5, 2, 40, 24), (128, 8, 2048, 768), (32, 4, 2880, 2880), (8, 2, 4096, 14336)]
SHAPES += [(256, 8, 7168, 2048), (64, 6, 2048, 1408)]


def works(matrices: int) -> list[Work]:
    cases = itertools.product(SHAPES, (1, 2, 4, 5, 8, 64, 256), (2, 4))
    return [Work(t, k, e, c, f, matrices, size) for (e, k, c, f), t, size in cases]


def check(launch: Launch, work: Work) -> None:
    assert launch.shared_bytes(work) <= SHARED_BYTES
    sizes = (launch.block_n, launch.block_k, launch.block_m, launch.warps)
    assert all(size & (size - 1) == 0 for size in sizes), "Triton's blocks are powers of two"
    if launch.method == "dot":
        assert launch.block_n >= 16
        assert launch.block_k >= 16
        assert launch.block_m >= 16


def test_choices_fit_every_card() -> None:
    for work in works(2):
        check(choose_up(work), work)
    for work in works(1):
        check(choose_down(work, True), work)
        check(choose_down(work, False), work)


@pytest.mark.parametrize("method", ["gemv", "dot", "token"])
def test_candidates_fit_every_card_and_start_with_the_choice(method: str) -> None:
    for work in works(1) + works(2):
        found = candidate_launches(work, method)  # type: ignore[arg-type]
        assert len(set(found)) == len(found)
        for launch in found:
            check(launch, work)
            assert launch.method == method


def test_the_down_product_sums_a_tokens_experts_where_little_is_read_twice() -> None:
    chosen = [choose_down(work, True).method for work in works(1) if work.num_tokens == 1]
    assert set(chosen) == {"token"}
    few = Work(4, 8, 128, 768, 2048, 1, 2)
    assert choose_down(few, True).method == "token"
    assert choose_down(few, False).method == "dot"
    for many in (Work(8, 8, 128, 768, 2048, 1, 2), Work(4, 4, 32, 2880, 2880, 1, 2)):
        assert choose_down(many, True).method == "dot"


def test_num_active_counts_distinct_experts() -> None:
    assert Work(1, 8, 128, 1, 1, 1, 2).num_active == pytest.approx(8)
    assert Work(2, 4, 4, 1, 1, 1, 2).num_active == pytest.approx(4)
    assert 50 < Work(8, 8, 128, 1, 1, 1, 2).num_active < 55
