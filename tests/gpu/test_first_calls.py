"""After its start a worker compiles nothing: no length of a prompt pays for being the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from make_moe import make_checkpoint
from triton import knobs

from freetoken.config import Config
from freetoken.wire.messages import StepMode
from freetoken.worker.budget import measure_budget
from freetoken.worker.checkpoint import CheckpointSource
from freetoken.worker.device import find_device
from freetoken.worker.link import Progress
from freetoken.worker.runner import Runner
from freetoken.worker.startup import start
from tests.gpu.test_memory_gpu import SHAPES
from tests.worker.plans import start_plan

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

CONTEXT_TOKENS = 40960
# (cached, new): within a tile, just a tile, several chunks, what begins and ends anywhere. Not a
# chunk of a single token: one graph is compiled for the first, in under a second.
FRESH = (3, 64, 100, 1000, 4096, 8191, 8192, 20000, 32768)
CACHED = ((1, 300), (2, 8190), (17, 12000), (2048, 64), (5000, 9000), (8190, 9000), (31000, 5000))
PASSES = tuple((0, length) for length in FRESH) + CACHED
ON_DEMAND = ((0, 1), (0, 9), (40, 16), (3000, 1), (30000, 200))


@pytest.fixture(params=list(SHAPES))
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Runner]:
    shape = replace(SHAPES[request.param], max_position=2 * CONTEXT_TOKENS)
    path = make_checkpoint(tmp_path / "moe", shape)
    config = Config(
        model=str(path), device="cuda", moe_cache_rate=0.5, num_tokens=CONTEXT_TOKENS + 16
    )
    source = CheckpointSource(path, "auto", find_device("cuda"))
    yield start(config, source, Progress(), measure_budget()).runner
    torch._dynamo.reset()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The names of what has been compiled since it was last asked, by Triton and torch.compile."""
    kernels: list[str] = []
    monkeypatch.setattr(
        knobs.runtime, "jit_cache_hook", lambda **call: kernels.append(call["repr"])
    )
    stats = torch._dynamo.utils.counters["stats"]
    num_graphs = stats["unique_graphs"]

    def take() -> list[str]:
        nonlocal num_graphs
        found = kernels + ["a graph"] * (stats["unique_graphs"] - num_graphs)
        kernels.clear()
        num_graphs = stats["unique_graphs"]
        return found

    return take


def extend(runner: Runner, cached: int, new: int, mode: StepMode) -> None:
    """Of a row of its own; what is cached is whatever the pages hold."""
    prompt = [i % 200 for i in range(cached + new)]
    num_pages = -(-len(prompt) // runner.limits.page_size)
    runner.execute(start_plan(0, prompt, 0, num_pages=num_pages, cached=cached, mode=mode))
    runner.forget_all()


def test_no_length_is_compiled_for(runner: Runner, compiled: Callable[[], list[str]]) -> None:
    found = {}
    for mode, cases in ((StepMode.PASS, PASSES), (StepMode.ON_DEMAND, ON_DEMAND)):
        for cached, new in cases:
            extend(runner, cached, new, mode)
            if names := compiled():
                found[mode, cached, new] = names
    assert not found
