"""What a worker takes on the GPU stays within what its memory plan prices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from make_moe import MoeShape, make_checkpoint

from freetoken.config import Config
from freetoken.wire.messages import StepMode, StepPlan
from freetoken.worker.budget import measure_budget
from freetoken.worker.checkpoint import CheckpointSource
from freetoken.worker.device import find_device
from freetoken.worker.link import Progress
from freetoken.worker.startup import Started, start
from tests.worker.plans import start_plan

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]

SHAPES = {
    "qwen3_moe": MoeShape(
        layers=4,
        experts=32,
        top_k=4,
        hidden=1024,
        expert_hidden=512,
        heads=16,
        kv_heads=4,
        head_dim=64,
        vocab=32000,
    ),
    "gpt_oss": MoeShape(
        family="gpt_oss",
        layers=4,
        experts=16,
        top_k=4,
        hidden=960,
        expert_hidden=960,
        heads=16,
        kv_heads=4,
        head_dim=64,
        vocab=32000,
        max_position=131072,
    ),
}


def make_pass(started: Started, num_tokens: int) -> StepPlan:
    """Row 0 from its first token on."""
    prompt = [i % 200 for i in range(num_tokens)]
    num_pages = -(-num_tokens // started.ready.page_size)
    return start_plan(0, prompt, 0, num_pages=num_pages, mode=StepMode.PASS)


@pytest.mark.parametrize("compilation", ["off", "auto"])
@pytest.mark.parametrize("family", list(SHAPES))
def test_measured_memory_is_within_what_is_priced(
    family: str, compilation: str, tmp_path: Path
) -> None:
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    path = make_checkpoint(tmp_path / "moe", SHAPES[family])
    config = Config(
        model=str(path),
        device="cuda",
        compile=compilation,
        moe_cache_rate=0.5,
        num_tokens=49152,
        threads=len(os.sched_getaffinity(0)),
    )
    source = CheckpointSource(path, "auto", find_device("cuda"))
    started = start(config, source, Progress(), measure_budget())
    # The largest pass, twice: what a first call keeps must be within the plan, too.
    num_tokens = min(started.ready.max_pass_tokens, started.ready.context_tokens - 1)
    for _ in range(2):
        result = started.runner.execute(make_pass(started, num_tokens))
        assert len(result.token_ids) == 4
        started.runner.forget_all()
    torch.cuda.synchronize()
    measured = torch.cuda.max_memory_allocated() - before
    priced = sum(started.ready.plan.values())
    assert measured <= priced, f"{measured >> 20} MiB measured, {started.ready.plan}"
    torch._dynamo.reset()
