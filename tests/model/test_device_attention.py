"""The way of a GPU on the CPU: attention through the kernels' interface, with the references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from freetoken.model import device_attention
from freetoken.model.load import load_model
from freetoken.model.served import ServedModel
from freetoken.model.trial import Part, Trial
from tests.model import tiny

# With and without: windows, sinks, softcap, unequal head sizes, biases.
FAMILIES = ["qwen3_moe", "gpt_oss", "mixtral-window", "qwen2_moe", "olmoe", "mistral", "glm4_moe"]
LENGTH = 27


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, ServedModel]:
    plain = tiny.make_model(tiny.make_config(request.param))
    return plain, load(tiny.save(plain, tmp_path_factory.mktemp("checkpoint")))


def load(path: Path) -> ServedModel:
    return load_model(
        path,
        dtype="float32",
        device="cpu",
        experts="in-place",
        num_slots=None,
        progress=lambda phase, done, total: None,
        use_kernels=True,
    )


def assert_equal(trial: Trial, plain: PreTrainedModel, rows: list[torch.Tensor]) -> None:
    for row, ids in enumerate(rows):
        got = trial.logits(row)
        assert tiny.relative_error(got, tiny.plain_logits(plain, ids)[: len(got)]) < 1e-4


def test_steps_of_mixed_rows_equal_transformers(
    family: tuple[PreTrainedModel, ServedModel],
) -> None:
    plain, ours = family
    rows = [tiny.random_ids(length, 10 + length) for length in (LENGTH, 13, 5)]
    trial = Trial(ours, rows)
    trial.step(Part(0, 12), Part(1, 12), Part(2, 1))
    trial.step(Part(0, 11), Part(1, 1), Part(2, 1))
    trial.step(Part(2, 3), Part(0, 4))
    assert_equal(trial, plain, rows)


@pytest.mark.parametrize("chunk_tokens", [4, 5, 64])
def test_passes_equal_transformers(
    family: tuple[PreTrainedModel, ServedModel], chunk_tokens: int
) -> None:
    plain, ours = family
    rows = [tiny.random_ids(length, 20 + length) for length in (LENGTH, 13)]
    trial = Trial(ours, rows)
    trial.run_pass(Part(0, 16), Part(1, 9), chunk_tokens=chunk_tokens)
    trial.step(Part(0, 1))
    trial.run_pass(Part(1, 3), Part(0, LENGTH - 17), chunk_tokens=chunk_tokens)
    assert_equal(trial, plain, rows)


def test_prefix_hit_equals_transformers(family: tuple[PreTrainedModel, ServedModel]) -> None:
    plain, ours = family
    first = tiny.random_ids(LENGTH, 4)
    second = torch.cat([first[:10], tiny.random_ids(LENGTH - 10, 5)])
    trial = Trial(ours, [first, second, second])
    trial.step(Part(0, LENGTH))
    trial.share_prefix(0, 1, 10)
    trial.share_prefix(0, 2, 10)
    trial.step(Part(1, LENGTH - 10))
    trial.run_pass(Part(2, LENGTH - 10), chunk_tokens=7)
    expected = tiny.plain_logits(plain, second)[10:]
    assert tiny.relative_error(trial.logits(1), expected) < 1e-4
    assert tiny.relative_error(trial.logits(2), expected) < 1e-4


@pytest.mark.parametrize("num_kept", [0, 1, 2])
def test_where_keys_lie_is_kept_once_for_a_row(
    family: tuple[PreTrainedModel, ServedModel], num_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each chunk and window: a pass in small chunks would take the square of its length."""
    plain, ours = family
    found: list[torch.Tensor] = []
    find = device_attention.RowSlots._find

    def note(*args: Any) -> torch.Tensor:
        found.append(find(*args))
        return found[-1]

    monkeypatch.setattr(device_attention.RowSlots, "_find", note)
    monkeypatch.setattr(device_attention, "MAX_KEPT_ROWS", num_kept)
    rows = [tiny.random_ids(length, 20 + length) for length in (LENGTH, 13)]
    trial = Trial(ours, rows)
    trial.run_pass(Part(0, LENGTH), Part(1, 13), chunk_tokens=3)
    assert len(found) == 2 if num_kept == 2 else len(found) > 2
    assert {len(slots) for slots in found} == {28, 16}, "whole pages"
    assert_equal(trial, plain, rows)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_padding_changes_nothing(
    family: tuple[PreTrainedModel, ServedModel], poison: float
) -> None:
    plain, ours = family
    rows = [tiny.random_ids(LENGTH, 1), tiny.random_ids(9, 2)]
    trial = Trial(ours, rows, num_padding=3)
    trial.step(Part(0, 20), Part(1, 5))
    for pool in (*trial.pools.k, *trial.pools.v):
        pool[-1] = poison
    trial.step(Part(0, 6), Part(1, 1))
    trial.step(Part(0, 1), Part(1, 1))
    assert_equal(trial, plain, rows)
