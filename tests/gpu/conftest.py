"""Tests that need a GPU; skipped where torch has none."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(autouse=True, scope="session")
def _exact_products() -> Iterator[None]:
    """fp32 products in fp32, here and in transformers."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(precision)


@pytest.fixture(autouse=True)
def _memory_given_back() -> Iterator[None]:
    """Models are held by cycles: they go now, and not while a later test captures or measures."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
