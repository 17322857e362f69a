"""Experts through slots: the same logits, and exactly the loads that the design promises."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from freetoken.model.load import load_model, read_shape
from freetoken.model.served import ServedModel
from freetoken.model.trial import Part, Trial
from tests.model import tiny

FAMILIES = ["qwen3_moe", "gpt_oss", "granitemoe", "ernie4_5_moe"]
LENGTH = 27
NUM_EXPERTS = 8
TOP_K = 2


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Path]:
    plain = tiny.make_model(tiny.make_config(request.param))
    return plain, tiny.save(plain, tmp_path_factory.mktemp("checkpoint"))


def load(path: Path, num_slots: int) -> ServedModel:
    return load_model(
        path,
        dtype="float32",
        device="cpu",
        experts="slots",
        num_slots=num_slots,
        progress=lambda phase, done, total: None,
    )


@pytest.mark.parametrize("num_slots", [1, 3, 13, 100])
def test_logits_do_not_depend_on_the_number_of_slots(
    checkpoint: tuple[PreTrainedModel, Path], num_slots: int
) -> None:
    plain, path = checkpoint
    rows = [tiny.random_ids(length, length) for length in (LENGTH, 11)]
    trial = Trial(load(path, num_slots), rows)
    trial.step(Part(0, 7), Part(1, 6))
    trial.run_pass(Part(0, 9), Part(1, 3), chunk_tokens=4)
    for _ in range(2):
        trial.step(Part(0, 1), Part(1, 1))
    trial.run_pass(Part(0, LENGTH - 18), chunk_tokens=100)
    for row, ids in enumerate(rows):
        expected = tiny.plain_logits(plain, ids)
        assert tiny.relative_error(trial.logits(row), expected) < 1e-4


def test_extend_on_demand_loads_at_most_what_its_tokens_ask_for(
    checkpoint: tuple[PreTrainedModel, Path],
) -> None:
    model = load(checkpoint[1], num_slots=5)
    shape = model.shape
    trial = Trial(model, [tiny.random_ids(LENGTH, 1)])
    trial.step(Part(0, 20))
    model.take_counters()
    for length in (1, 2, 3):
        trial.step(Part(0, length))
        counters = model.take_counters()
        assert counters.slot_misses <= length * TOP_K * shape.num_moe_layers
        assert counters.slot_hits + counters.slot_misses == counters.distinct_experts
        assert counters.expert_bytes == counters.slot_misses * shape.expert_bytes


@pytest.mark.parametrize("chunk_tokens", [3, 10, 1000])
def test_pass_loads_each_non_resident_expert_once_whatever_its_length(
    checkpoint: tuple[PreTrainedModel, Path], chunk_tokens: int
) -> None:
    model = load(checkpoint[1], num_slots=5)
    shape = model.shape
    trial = Trial(model, [tiny.random_ids(LENGTH, 2)])
    trial.step(Part(0, 2))
    resident = min(5, model.take_counters().slot_misses)
    trial.run_pass(Part(0, LENGTH - 2), chunk_tokens=chunk_tokens)
    counters = model.take_counters()
    total = NUM_EXPERTS * shape.num_moe_layers
    assert counters.slot_hits == resident
    assert counters.slot_misses == total - resident
    assert counters.expert_bytes == counters.slot_misses * shape.expert_bytes


def test_pass_does_not_evict_what_decode_uses(checkpoint: tuple[PreTrainedModel, Path]) -> None:
    model = load(checkpoint[1], num_slots=TOP_K * 3)
    ids = tiny.random_ids(8, 3)
    trial = Trial(model, [ids, tiny.random_ids(LENGTH, 4), ids])
    trial.step(Part(0, 7))
    trial.step(Part(0, 1))
    model.take_counters()
    trial.run_pass(Part(1, LENGTH), chunk_tokens=5)
    model.take_counters()
    trial.share_prefix(0, 2, 7)
    trial.step(Part(2, 1))
    assert model.take_counters().slot_misses == 0


def test_everything_hits_once_all_experts_have_a_slot(
    checkpoint: tuple[PreTrainedModel, Path],
) -> None:
    model = load(checkpoint[1], num_slots=NUM_EXPERTS * 3)
    trial = Trial(model, [tiny.random_ids(LENGTH, 5), tiny.random_ids(LENGTH, 5)])
    trial.step(Part(0, LENGTH))
    assert model.take_counters().slot_misses > 0
    trial.step(Part(1, LENGTH))
    assert model.take_counters().slot_misses == 0
    assert torch.equal(trial.logits(0), trial.logits(1))


def test_filled_slots_hold_what_they_say(checkpoint: tuple[PreTrainedModel, Path]) -> None:
    plain, path = checkpoint
    ids = tiny.random_ids(LENGTH, 3)
    num_layers = tiny_layers(path)
    model = load(path, num_slots=num_layers * NUM_EXPERTS)
    model.fill_slots()
    trial = Trial(model, [ids])
    trial.step(Part(0, 9))
    trial.run_pass(Part(0, LENGTH - 9), chunk_tokens=5)
    counters = model.take_counters()
    assert counters.slot_misses == counters.expert_bytes == 0
    assert counters.slot_hits > 0
    assert tiny.relative_error(trial.logits(0), tiny.plain_logits(plain, ids)) < 1e-4


def tiny_layers(path: Path) -> int:
    return read_shape(path, "float32").num_moe_layers
