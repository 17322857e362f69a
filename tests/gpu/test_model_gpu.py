"""The model room on a GPU: captured steps, banks that are not pinned, the self-check.

In fp32 (no TF32) logits may differ by 1e-4 relative, where the order of sums gives 1e-6.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from freetoken.model.compile_check import compile_checked
from freetoken.model.context import StepContext
from freetoken.model.load import load_model
from freetoken.model.selfcheck import check_config
from freetoken.model.served import ServedModel
from freetoken.model.trial import Part, Trial
from tests.model import tiny

# The compiler warns of what it would rather do, such as TF32.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

DEVICE = "cuda"
TOLERANCE = 1e-4
LENGTH = 27
NUM_SLOTS = 7
COMPILED = ["qwen3_moe", "gpt_oss", "glm4_moe", "llama"]


class Family:
    def __init__(self, name: str, path: Path) -> None:
        self.plain = tiny.make_model(tiny.make_config(name))
        self.path = tiny.save(self.plain, path)

    def load(self, dtype: str = "float32", num_slots: int = NUM_SLOTS) -> ServedModel:
        return load_model(
            self.path,
            dtype=dtype,
            device=DEVICE,
            experts="slots",
            num_slots=num_slots,
            progress=lambda what, done, total: None,
            use_kernels=True,
        )

    def check(self, trial: Trial, rows: list[torch.Tensor]) -> None:
        for row, ids in enumerate(rows):
            got = trial.logits(row)
            expected = tiny.plain_logits(self.plain, ids)[: len(got)]
            assert tiny.relative_error(got, expected) < TOLERANCE, f"row {row}"


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    return {}


@pytest.fixture
def family(
    request: pytest.FixtureRequest,
    families: dict[str, Family],
    tmp_path_factory: pytest.TempPathFactory,
) -> Family:
    name = request.param
    if name not in families:
        families[name] = Family(name, tmp_path_factory.mktemp("checkpoint"))
    return families[name]


def mixed_steps(trial: Trial) -> None:
    """Extends, decodes, and passes with a prefix, of rows 0 and 1."""
    trial.step(Part(0, 7), Part(1, 6))
    trial.run_pass(Part(0, 9), Part(1, 3), chunk_tokens=4)
    trial.step(Part(0, 1), Part(1, 1))
    trial.step(Part(1, 1), Part(0, 2))
    trial.run_pass(Part(0, LENGTH - 19), chunk_tokens=100)


ROWS = [(LENGTH, 1), (11, 2)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", COMPILED, indirect=True)
def test_captured_steps_equal_transformers(family: Family, compiled: bool) -> None:
    torch._dynamo.reset()
    model = family.load()
    if compiled:
        assert compile_checked(model)
    assert model.can_capture
    rows = [tiny.random_ids(LENGTH, 1), tiny.random_ids(LENGTH, 2)]
    trial = Trial(model, rows)
    trial.step(Part(0, 5), Part(1, 9))
    capture_steps(model, num_tokens=4)
    for _ in range(8):
        trial.step(Part(0, 1), Part(1, 1))
    trial.step(Part(0, 3), Part(1, 1))
    family.check(trial, rows)


@pytest.mark.parametrize("family", ["qwen3_moe"], indirect=True)
def test_banks_are_pinned_again_where_others_were(family: Family) -> None:
    rows = [tiny.random_ids(length, seed) for length, seed in ROWS]
    for _ in range(3):
        model = family.load()
        assert model.can_capture
        trial = Trial(model, rows)
        mixed_steps(trial)
        family.check(trial, rows)
        del model, trial
        gc.collect()


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"], indirect=True)
def test_banks_that_are_not_pinned_are_staged(family: Family) -> None:
    model = family.load()
    assert model._slots is not None
    for bank in model._slots.pool.banks[1:]:
        bank.is_pinned = False
    assert not model.can_capture
    rows = [tiny.random_ids(length, seed) for length, seed in ROWS]
    trial = Trial(model, rows)
    mixed_steps(trial)
    family.check(trial, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "glm4_moe", "mixtral", "gemma2"])
def test_self_check_passes(name: str, dtype: torch.dtype) -> None:
    config = AutoConfig.for_model(name, num_hidden_layers=4)
    check_config(config, experts="slots", dtype=dtype, device=DEVICE)


def capture_steps(model: ServedModel, num_tokens: int) -> None:
    """From now on steps of up to `num_tokens` tokens are replayed from one graph."""
    eager = model.forward
    graph = torch.cuda.CUDAGraph()
    ids, rows, positions = (
        torch.zeros(num_tokens, dtype=torch.int64, device=DEVICE) for _ in range(3)
    )
    count = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    at = torch.arange(num_tokens, device=DEVICE)
    captured: list[torch.Tensor] = []

    def forward(given: torch.Tensor, context: StepContext, logits_at: torch.Tensor) -> torch.Tensor:
        size = len(given)
        if size > num_tokens:
            return eager(given, context, logits_at)
        for static, value in ((ids, given), (rows, context.rows), (positions, context.positions)):
            static[:size] = value
        count.fill_(size)
        if not captured:
            static_context = StepContext(
                positions, rows, context.page_table, (), context.pools, count
            )
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                eager(ids, static_context, at)  # compiles what this size needs
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                captured.append(eager(ids, static_context, at))
        graph.replay()
        return captured[0][logits_at].clone()

    model.forward = forward  # type: ignore[method-assign]
