"""A worker that is started again: the banks of the one before, and a plan as if they were free."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from freetoken.config import Config
from freetoken.errors import ConfigError
from freetoken.experts.shared import BankMemory
from freetoken.model import banks
from freetoken.worker import checkpoint as subject
from freetoken.worker import startup
from freetoken.worker.checkpoint import CheckpointSource
from freetoken.worker.link import Progress
from freetoken.worker.startup import Started, start
from tests.model import tiny

BUDGET = 1 << 30


class Shelf:
    """A BankKeeper; `dropped`: how often something was."""

    def __init__(self) -> None:
        self.kept: tuple[str, int] | None = None
        self.dropped = 0

    def take(self, digest: str) -> int | None:
        """Like a service manager's: whatever is there."""
        return None if self.kept is None else os.dup(self.kept[1])

    def keep(self, digest: str, fd: int) -> None:
        self.drop()
        self.kept = (digest, os.dup(fd))

    def drop(self) -> None:
        if self.kept is not None:
            os.close(self.kept[1])
            self.kept = None
            self.dropped += 1


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """In place of the self-check, which takes a second and has a test of its own."""
    paths: list[Path] = []
    monkeypatch.setattr(subject, "check_model", lambda path, **_: paths.append(path))
    return paths


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny.save(tiny.make_model(tiny.make_config("qwen3_moe")), tmp_path)


def start_worker(
    path: Path, shelf: Shelf, budget: int | None = BUDGET, **options: object
) -> Started:
    values = {"experts": "slots", "moe_cache_size": 4} | options
    config = Config(model=str(path), dtype="float32", max_rows=4, max_step_tokens=64, **values)
    source = CheckpointSource(path, config.dtype, torch.device("cpu"), shelf)
    return start(config, source, Progress(), budget)


def test_the_next_worker_reads_no_experts_and_plans_the_same(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf()
    first = start_worker(checkpoint, shelf)
    assert shelf.kept is not None
    kept_bytes = os.fstat(shelf.kept[1]).st_size
    monkeypatch.setattr(subject, "measure_budget", lambda: 0)  # all that was free is taken
    with pytest.raises(ConfigError, match="expert banks need"):
        start_worker(checkpoint, Shelf())
    again = start_worker(checkpoint, shelf, BUDGET - kept_bytes)
    assert again.ready == first.ready
    assert shelf.dropped == 0


def test_a_class_is_checked_once_for_the_workers_that_find_all_banks_filled(
    checkpoint: Path, checked: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf()
    start_worker(checkpoint, shelf)
    start_worker(checkpoint, shelf)
    assert len(checked) == 1
    assert shelf.kept is not None
    with monkeypatch.context() as patched:
        patched.setattr(BankMemory, "is_filled", lambda memory, layer: layer != 1)
        start_worker(checkpoint, shelf)
    assert len(checked) == 2, "the one before may have ended before it had filled them"
    monkeypatch.setattr(banks, "version", lambda name: f"another {name}")
    start_worker(checkpoint, shelf)
    assert len(checked) == 3, "and with other software"
    start_worker(checkpoint, Shelf())
    assert len(checked) == 4


def test_banks_of_another_checkpoint_are_dropped_before_new_ones_are_made(checkpoint: Path) -> None:
    shelf = Shelf()
    start_worker(checkpoint, shelf)
    assert shelf.kept is not None
    old = shelf.kept[0]
    shard = next(checkpoint.glob("*.safetensors"))
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard)
    start_worker(checkpoint, shelf)
    assert shelf.dropped == 1
    assert shelf.kept is not None
    assert shelf.kept[0] != old


def test_banks_of_another_checkpoint_do_not_count_against_the_budget(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their memory is free when they are dropped, and not before."""
    shelf = Shelf()
    start_worker(checkpoint, shelf)
    os.utime(next(checkpoint.glob("*.safetensors")))
    measured = []

    def measure() -> int:
        measured.append(shelf.dropped)
        return BUDGET

    monkeypatch.setattr(startup, "measure_budget", measure)
    start_worker(checkpoint, shelf, None)
    assert measured == [1]


def test_experts_in_place_have_nothing_to_keep(checkpoint: Path) -> None:
    shelf = Shelf()
    start_worker(checkpoint, shelf, experts="in-place", moe_cache_size=None)
    assert shelf.kept is None
