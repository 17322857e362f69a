"""Passes that pause between layers, with on-demand steps in between."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from freetoken.model.context import Segment
from freetoken.model.load import load_model
from freetoken.model.passes import find_bounds
from freetoken.model.served import ServedModel
from freetoken.model.trial import Part, Trial
from tests.model import tiny

FAMILIES = ["qwen3_moe", "gpt_oss", "glm4_moe", "llama"]
LENGTH = 27
NUM_LAYERS = 3


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, Path]:
    plain = tiny.make_model(tiny.make_config(request.param))
    return plain, tiny.save(plain, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(params=["in-place", "slots"])
def model(request: pytest.FixtureRequest, checkpoint: tuple[PreTrainedModel, Path]) -> ServedModel:
    return load_model(
        checkpoint[1],
        dtype="float32",
        device="cpu",
        experts=request.param,
        num_slots=5 if request.param == "slots" else None,
        progress=lambda phase, done, total: None,
    )


def assert_equal(trial: Trial, plain: PreTrainedModel, rows: list[torch.Tensor]) -> None:
    for row, ids in enumerate(rows):
        got = trial.logits(row)
        assert tiny.relative_error(got, tiny.plain_logits(plain, ids)[: len(got)]) < 1e-4


@pytest.mark.parametrize("layers_at_a_time", [1, 2])
def test_on_demand_steps_between_layers_leave_a_pass_exact(
    checkpoint: tuple[PreTrainedModel, Path], model: ServedModel, layers_at_a_time: int
) -> None:
    rows = [tiny.random_ids(LENGTH, 1), tiny.random_ids(14, 2), tiny.random_ids(11, 3)]
    trial = Trial(model, rows)
    trial.step(Part(1, 8), Part(2, 3))
    open_pass = trial.start_pass(Part(0, LENGTH), Part(2, 8), chunk_tokens=6)
    pauses = 0
    while not open_pass.advance(layers_at_a_time):
        trial.step(Part(1, 1 + pauses))
        pauses += 1
    assert pauses == (NUM_LAYERS - 1) // layers_at_a_time
    trial.finish_pass(open_pass)
    trial.step(Part(1, 2))
    assert_equal(trial, checkpoint[0], rows)


def test_pass_that_is_closed_leaves_the_model_ready(
    checkpoint: tuple[PreTrainedModel, Path], model: ServedModel
) -> None:
    rows = [tiny.random_ids(LENGTH, 1), tiny.random_ids(14, 2)]
    trial = Trial(model, rows)
    old_threads = set(threading.enumerate())
    for num_layers in (None, 1, 2):
        open_pass = trial.start_pass(Part(0, LENGTH), chunk_tokens=6)
        if num_layers is not None:
            assert not open_pass.advance(num_layers)
        open_pass.close()
        open_pass.close()
    assert len(set(threading.enumerate()) - old_threads) == 1
    trial.step(Part(1, 14))
    trial.run_pass(Part(0, LENGTH), chunk_tokens=6)
    assert_equal(trial, checkpoint[0], rows)


def test_fault_in_a_pass_reaches_advance_and_ends_it(
    checkpoint: tuple[PreTrainedModel, Path], model: ServedModel
) -> None:
    rows = [tiny.random_ids(LENGTH, 1)]
    trial = Trial(model, rows)
    handle = model._layers[1].register_forward_pre_hook(_fail)
    open_pass = trial.start_pass(Part(0, LENGTH), chunk_tokens=6)
    assert not open_pass.advance(1)
    with pytest.raises(MemoryError, match="on purpose"):
        open_pass.advance()
    open_pass.close()
    handle.remove()
    trial.run_pass(Part(0, LENGTH), chunk_tokens=6)
    assert_equal(trial, checkpoint[0], rows)


def test_second_pass_is_refused_while_one_is_open(model: ServedModel) -> None:
    trial = Trial(model, [tiny.random_ids(LENGTH, 1)])
    open_pass = trial.start_pass(Part(0, 5), chunk_tokens=6)
    with pytest.raises(AssertionError, match="a pass is open"):
        trial.start_pass(Part(0, 5), chunk_tokens=6)
    open_pass.close()


def _fail(*_: object) -> None:
    raise MemoryError("on purpose")


@pytest.mark.parametrize(
    ("rows", "chunk_tokens", "bounds"),
    [
        ([(0, 20)], 8, [8, 16, 20]),
        ([(1, 20)], 8, [7, 15, 20]),
        ([(7, 20)], 8, [1, 9, 17, 20]),
        ([(3, 8)], 8, [8]),
        ([(5, 5), (0, 9), (2, 9)], 8, [5, 13, 20, 23]),
        ([(0, 6), (3, 9)], 8, [8, 15]),
        ([(0, 6), (7, 9)], 8, [7, 15]),
        ([(0, 6), (1, 16)], 8, [8, 13, 21, 22]),  # no tile of the second row ends by 8
        ([(1, 20)], 13, [7, 20]),
        ([(1, 20)], 5, [3, 7, 11, 15, 20]),
        ([(1, 9)], 3, [3, 6, 9]),
        ([(1, 3), (2, 2)], 1, [1, 2, 3, 4, 5]),
        ([], 8, []),
    ],
)
def test_chunks_end_at_tiles_of_their_rows(
    rows: list[tuple[int, int]], chunk_tokens: int, bounds: list[int]
) -> None:
    segments, start = [], 0
    for row, (cached, length) in enumerate(rows):
        segments.append(Segment(row, start, length, cached))
        start += length
    got = find_bounds(segments, chunk_tokens, sizes=(8, 4))
    assert [hi for _, hi in got] == bounds
    assert [lo for lo, _ in got] == [0, *bounds][: len(got)]
