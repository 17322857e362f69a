"""Compiled decoder layers: no graph breaks, one artefact for all layers, the same numbers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import PreTrainedModel

from freetoken.model.load import load_model
from freetoken.model.served import ServedModel
from freetoken.model.trial import Part, Trial
from tests.model import tiny

LENGTH = 27
# Kinds of layers: glm4_moe's first is dense, gpt_oss's have a window or none.
KINDS = {"qwen3_moe": 1, "gpt_oss": 2, "glm4_moe": 2, "llama": 1, "ernie4_5_moe": 2}
# Beside them the rotary embedding and the last norm.
FAMILIES = {name: kinds + 2 for name, kinds in KINDS.items()}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


ALWAYS = ("qwen3_moe", "gpt_oss")
PARAMS = [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in KINDS]


@pytest.fixture(scope="module", params=PARAMS)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, PreTrainedModel, Path]:
    plain = tiny.make_model(tiny.make_config(request.param))
    return request.param, plain, tiny.save(plain, tmp_path_factory.mktemp("checkpoint"))


def load(path: Path, num_slots: int | None = None) -> ServedModel:
    """As on a GPU, with reference kernels."""
    return load_model(
        path,
        dtype="float32",
        device="cpu",
        experts="in-place" if num_slots is None else "slots",
        num_slots=num_slots,
        progress=lambda phase, done, total: None,
        use_kernels=True,
    )


def test_layers_of_a_kind_share_one_artefact_and_equal_transformers(
    family: tuple[str, PreTrainedModel, Path],
) -> None:
    name, plain, path = family
    model = load(path, None if name == "llama" else 7)
    counter = CompileCounterWithBackend("aot_eager")
    model.compile_layers(counter)
    rows = [tiny.random_ids(LENGTH, 1), tiny.random_ids(13, 2)]
    trial = Trial(model, rows)
    trial.step(Part(0, 4), Part(1, 3))
    assert counter.frame_count == FAMILIES[name]
    trial.step(Part(0, 2), Part(1, 1))
    trial.run_pass(Part(0, 17), Part(1, 8), chunk_tokens=5)
    assert counter.frame_count == FAMILIES[name]
    for _ in range(3):
        trial.step(Part(0, 1))
    assert counter.frame_count == 2 * FAMILIES[name], "one token has code of its own"
    open_pass = trial.start_pass(Part(0, 1), chunk_tokens=6)
    assert not open_pass.advance(1)
    trial.step(Part(1, 1))
    assert open_pass.advance()
    trial.finish_pass(open_pass)
    assert counter.frame_count == 2 * FAMILIES[name]
    for row, ids in enumerate(rows):
        got = trial.logits(row)
        assert tiny.relative_error(got, tiny.plain_logits(plain, ids)[: len(got)]) < 1e-4


def test_two_models_share_code_and_not_state(
    family: tuple[str, PreTrainedModel, Path],
) -> None:
    name, plain, path = family
    counter = CompileCounterWithBackend("eager")
    trials = []
    for seed in (1, 2):
        model = load(path)
        model.compile_layers(counter)
        trials.append(Trial(model, [tiny.random_ids(LENGTH, seed)]))
    for trial in (*trials, *trials):
        trial.step(Part(0, 5))
    # The eager backend's counter belongs to the function that is compiled, each model's own.
    assert counter.frame_count <= 2 * FAMILIES[name]
    for seed, trial in zip((1, 2), trials, strict=True):
        expected = tiny.plain_logits(plain, tiny.random_ids(LENGTH, seed))[:10]
        assert tiny.relative_error(trial.logits(0), expected) < 1e-4


@pytest.mark.slow
def test_the_compiler_is_loaded_without_a_gpu() -> None:
    script = (
        "import sys, torch; from freetoken.model.compile import load_compiler; load_compiler();"
        "from torch._inductor.codecache import torch_key;"
        "assert 'freetoken.model.graph_passes' in sys.modules;"
        "assert 'torch._inductor.compile_fx' in sys.modules;"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
