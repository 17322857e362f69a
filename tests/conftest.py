"""Fixtures that several rooms' tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetoken.demo.build import ensure_demo


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    """The demo checkpoint (bf16, Qwen3-MoE form) in the user's own cache, built on first use."""
    return ensure_demo(report=print)
