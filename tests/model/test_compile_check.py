from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from freetoken.model import compile as compile_module
from freetoken.model import compile_check
from freetoken.model.compile_check import compile_checked
from freetoken.model.load import load_model
from freetoken.model.served import ServedModel
from freetoken.model.trial import Part, Trial
from tests.model import tiny


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plain = tiny.make_model(tiny.make_config("qwen3_moe"))
    return tiny.save(plain, tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def model(path: Path) -> ServedModel:
    return load_model(
        path,
        dtype="float32",
        device="cpu",
        experts="slots",
        num_slots=7,
        progress=lambda what, done, total: None,
        use_kernels=True,
    )


def use_backend(monkeypatch: pytest.MonkeyPatch, backend: object) -> None:
    plain = ServedModel.compile_layers
    monkeypatch.setattr(ServedModel, "compile_layers", lambda self: plain(self, backend))


def logits(model: ServedModel) -> torch.Tensor:
    trial = Trial(model, [tiny.random_ids(12, 1)])
    trial.step(Part(0, 11))
    trial.step(Part(0, 1))
    return trial.logits(0)


def test_compiled_layers_are_used_when_they_compute_the_same(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        calls.append(graph)
        return graph.forward

    use_backend(monkeypatch, backend)
    assert compile_checked(model)
    # Layer, norm and rotary embedding, for several tokens and for one.
    assert len(calls) == 6


def test_layers_that_do_not_compile_run_as_they_are(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(model)

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        raise NotImplementedError("not such a graph")

    use_backend(monkeypatch, backend)
    assert not compile_checked(model)
    assert "without torch.compile" in caplog.text
    assert "not such a graph" in caplog.text
    assert torch.equal(logits(model), expected)


def test_layers_that_compute_something_else_run_as_they_are(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = logits(model)

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        return lambda *args: tuple(out * 1.01 for out in graph(*args))

    use_backend(monkeypatch, backend)
    assert not compile_checked(model)
    assert "logits differ by" in caplog.text
    assert torch.equal(logits(model), expected)


def test_layers_that_are_compiled_for_each_number_of_tokens_run_as_they_are(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After some dozens of numbers torch.compile would refuse in the middle of serving."""
    expected = logits(model)
    use_backend(monkeypatch, "eager")
    monkeypatch.setattr(compile_module, "_mark", lambda value, num_tokens: None)
    assert not compile_checked(model)
    assert "each number of tokens" in caplog.text
    assert torch.equal(logits(model), expected)


def test_every_type_has_a_tolerance() -> None:
    assert set(compile_check.TOLERANCE) == {torch.float32, torch.float16, torch.bfloat16}
