"""Sizes of published models as the planner sees them on a GPU, from tests/fixtures/models."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from freetoken.model.load import read_shape
from freetoken.worker.checkpoint import sizes_of
from freetoken.worker.sizes import ModelSizes

MODELS = Path(__file__).parent / "fixtures" / "models"


@cache
def gpu_sizes(name: str) -> ModelSizes:
    return sizes_of(read_shape(MODELS / name, "auto"), on_gpu=True)
