"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from freetoken.demo.build import ensure_demo

# Several processes share the cores here: OpenMP threads that spin at barriers would hold each other
# up (30 times slower seen on two cores). Read when torch is loaded, by us and by child processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

# In one of several test processes, each with its share of the cores.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _share = torch.get_num_threads() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    torch.set_num_threads(max(1, _share))

from freetoken.kernels.dispatch import fuse_products

# Without a GPU Triton kernels run in its interpreter. Read when triton is loaded, which importing
# transformers does.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# For tests that call the Triton modules themselves; see kernels/dispatch.py.
fuse_products()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes of tests, as their memory allows; on a GPU one, since some measure its memory.

    `-n auto` asks for it; 0 means no other process.
    """
    return 0 if torch.cuda.is_available() else min(2, os.cpu_count() or 1)


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """The demo checkpoint (bf16, Qwen3-MoE form) in the user's own cache, built on first use."""
    return ensure_demo(report=print)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A test that runs an entry point sets up logging; the next one must not notice."""
    logger = logging.getLogger("freetoken")
    level, propagate, handlers = logger.level, logger.propagate, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.propagate = propagate
    logger.handlers[:] = handlers
