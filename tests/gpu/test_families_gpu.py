"""Families on a GPU against plain transformers: both sides of the threshold, graphs, compilation.

In fp32 (no TF32) logits may differ by 1e-4 relative, where the order of sums gives 1e-6. In bf16
and fp16 our error against fp32 may be 1.5 times that of transformers in the same type.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from freetoken.model.context import StepContext
from freetoken.model.load import load_model
from freetoken.model.plain import build_plain
from freetoken.model.selfcheck import check_config
from freetoken.model.served import ServedModel
from freetoken.model.trial import Part, Trial
from tests.model import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
TOLERANCE = 1e-4
ERROR_FACTOR, ERROR_FLOOR = 1.5, 2e-3
LENGTH = 27
NUM_SLOTS = 7
COMPILED = ["qwen3_moe", "gpt_oss", "glm4_moe", "llama"]


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(precision)


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


@pytest.mark.parametrize("num_padding", [0, 3])
@pytest.mark.parametrize("family", list(tiny.FAMILIES), indirect=True)
def test_both_sides_of_the_threshold_equal_transformers(family: Family, num_padding: int) -> None:
    rows = [tiny.random_ids(length, seed) for length, seed in ROWS]
    trial = Trial(family.load(), rows, num_padding=num_padding)
    mixed_steps(trial)
    family.check(trial, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", list(tiny.FAMILIES), indirect=True)
def test_half_precision_errs_little_more_than_transformers_does(
    family: Family, dtype: torch.dtype
) -> None:
    rounded = build_plain(family.plain.config, dtype, DEVICE)
    rounded.load_state_dict(family.plain.state_dict())
    rows = [tiny.random_ids(LENGTH, seed) for seed in range(30, 36)]
    trial = Trial(family.load(str(dtype).removeprefix("torch.")), rows)
    trial.step(*(Part(row, LENGTH - 9) for row in range(len(rows))))
    trial.run_pass(*(Part(row, 8) for row in range(len(rows))), chunk_tokens=20)
    trial.step(*(Part(row, 1) for row in range(len(rows))))
    exact = torch.cat([tiny.plain_logits(family.plain, ids) for ids in rows])
    theirs = torch.cat([tiny.plain_logits(rounded, ids.to(DEVICE)).cpu() for ids in rows])
    ours = torch.cat([trial.logits(row) for row in range(len(rows))])
    allowed = ERROR_FACTOR * token_error(theirs, exact) + ERROR_FLOOR
    assert token_error(ours, exact) < allowed


@pytest.mark.parametrize("family", COMPILED, indirect=True)
def test_compiled_layers_equal_transformers(family: Family) -> None:
    torch._dynamo.reset()
    model = family.load()
    model.compile()
    assert model._model is not model._plain, "compilation was given up, see the log"
    rows = [tiny.random_ids(length, seed) for length, seed in ROWS]
    trial = Trial(model, rows)
    mixed_steps(trial)
    family.check(trial, rows)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", COMPILED, indirect=True)
def test_captured_steps_equal_transformers(family: Family, compiled: bool) -> None:
    torch._dynamo.reset()
    model = family.load()
    if compiled:
        model.compile()
    assert model.can_capture
    rows = [tiny.random_ids(LENGTH, 1), tiny.random_ids(LENGTH, 2)]
    trial = Trial(model, rows)
    trial.step(Part(0, 5), Part(1, 9))
    capture_steps(model, num_tokens=4)
    for _ in range(8):
        trial.step(Part(0, 1), Part(1, 1))
    trial.step(Part(0, 3), Part(1, 1))
    family.check(trial, rows)


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


@pytest.mark.parametrize("family", COMPILED, indirect=True)
def test_steps_between_the_layers_of_a_pass_change_nothing(family: Family) -> None:
    model = family.load()
    rows = [tiny.random_ids(LENGTH, 1), tiny.random_ids(14, 2), tiny.random_ids(11, 3)]
    trial = Trial(model, rows)
    trial.step(Part(1, 8), Part(2, 3))
    open_pass = trial.start_pass(Part(0, LENGTH), Part(2, 8), chunk_tokens=6)
    while not open_pass.advance(1):
        trial.step(Part(1, 2))
    trial.finish_pass(open_pass)
    trial.step(Part(1, 2))
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


def token_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The lower quartile over tokens: where two experts score alike, roundings pick one."""
    return float(((got - expected).norm(dim=1) / expected.norm(dim=1)).quantile(0.25))
