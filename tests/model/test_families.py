"""Families of transformers, saved, loaded by our loader and served, against plain transformers.

Tolerance: 1e-4 relative in fp32; what is seen is about 1e-6, the order of sums.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from freetoken.model.load import load_model
from freetoken.model.served import ServedModel
from freetoken.model.trial import Part, Trial
from tests.model import tiny

TOLERANCE = 1e-4
LENGTH = 27


class Served:
    """A family's reference model and our own, loaded from disk."""

    def __init__(self, family: str, path: Path) -> None:
        self.plain = tiny.make_model(tiny.make_config(family))
        self.path = tiny.save(self.plain, path)
        self.ours = self.load("float32")

    def load(self, dtype: str) -> ServedModel:
        return load_model(
            self.path,
            dtype=dtype,
            device="cpu",
            experts="in-place",
            num_slots=None,
            progress=lambda phase, done, total: None,
        )


@pytest.fixture(scope="module", params=list(tiny.FAMILIES))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp("checkpoint"))


def test_one_go_equals_plain_transformers(served: Served) -> None:
    ids = tiny.random_ids(LENGTH, 1)
    trial = Trial(served.ours, [ids])
    trial.step(Part(0, LENGTH))
    assert_equal(trial.logits(0), served, ids)


def test_chunks_past_the_window_equal_one_go(served: Served) -> None:
    ids = tiny.random_ids(LENGTH, 2)
    trial = Trial(served.ours, [ids])
    for length in (10, 7, 9, 1):
        trial.step(Part(0, length))
    assert_equal(trial.logits(0), served, ids)


def test_token_by_token_equals_one_go(served: Served) -> None:
    ids = tiny.random_ids(LENGTH, 3)
    trial = Trial(served.ours, [ids])
    for _ in range(LENGTH):
        trial.step(Part(0, 1))
    assert_equal(trial.logits(0), served, ids)


@pytest.mark.parametrize("shared", [8, 10])
def test_prefix_hit_equals_a_cold_run(served: Served, shared: int) -> None:
    first = tiny.random_ids(LENGTH, 4)
    second = torch.cat([first[:shared], tiny.random_ids(LENGTH - shared, 5)])
    trial = Trial(served.ours, [first, second])
    trial.step(Part(0, LENGTH))
    trial.share_prefix(0, 1, shared)
    trial.step(Part(1, LENGTH - shared))
    expected = tiny.plain_logits(served.plain, second)[shared:]
    assert tiny.relative_error(trial.logits(1), expected) < TOLERANCE
    assert_equal(trial.logits(0), served, first)


def test_rows_in_one_batch_do_not_disturb_each_other(served: Served) -> None:
    rows = [tiny.random_ids(length, 10 + length) for length in (LENGTH, 13, 5, 2)]
    trial = Trial(served.ours, rows)
    trial.step(Part(0, 12), Part(1, 12), Part(2, 1))
    trial.step(Part(3, 1), Part(0, 11), Part(1, 1), Part(2, 1))
    trial.step(Part(0, 1), Part(2, 1), Part(3, 1))
    trial.step(Part(2, 2), Part(0, 3))
    for row, ids in enumerate(rows):
        assert_equal(trial.logits(row), served, ids)


@pytest.mark.parametrize("chunk_tokens", [5, 64])
def test_pass_equals_one_go(served: Served, chunk_tokens: int) -> None:
    rows = [tiny.random_ids(length, 20 + length) for length in (LENGTH, 13)]
    trial = Trial(served.ours, rows)
    trial.run_pass(Part(0, 16), Part(1, 13), chunk_tokens=chunk_tokens)
    trial.step(Part(0, 1))
    trial.run_pass(Part(0, LENGTH - 17), chunk_tokens=chunk_tokens)
    for row, ids in enumerate(rows):
        assert_equal(trial.logits(row), served, ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_transformers_does(
    served: Served, dtype: torch.dtype
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(
        served.path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    rows = [tiny.random_ids(LENGTH, seed) for seed in range(30, 36)]
    trial = Trial(served.load(str(dtype).removeprefix("torch.")), rows)
    trial.step(*(Part(row, LENGTH - 2) for row in range(len(rows))))
    trial.step(*(Part(row, 1) for row in range(len(rows))))
    trial.step(*(Part(row, 1) for row in range(len(rows))))
    exact = torch.cat([tiny.plain_logits(served.plain, ids) for ids in rows])
    theirs = torch.cat([tiny.plain_logits(plain, ids) for ids in rows])
    ours = torch.cat([trial.logits(row) for row in range(len(rows))])
    assert token_error(ours, exact) < 1.3 * token_error(theirs, exact) + 1e-3


def token_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The lower quartile over tokens of the relative error.

    Not the mean: where two experts score alike, roundings pick one, and that token errs by much,
    with those that attend to it.
    """
    return float(((got - expected).norm(dim=1) / expected.norm(dim=1)).quantile(0.25))


def assert_equal(got: torch.Tensor, served: Served, ids: torch.Tensor) -> None:
    assert tiny.relative_error(got, tiny.plain_logits(served.plain, ids)) < TOLERANCE
