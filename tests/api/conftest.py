"""One tiny model for the session; a fresh scheduler and api for each test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.api.fake_scheduler import FakeScheduler
from tests.api.running import RunningApi
from tests.api.tiny_model import write_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny-model")


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short: the path of a socket holds 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ft") as path:
        yield Path(path)


@pytest.fixture
def fake(run_dir: Path) -> Iterator[FakeScheduler]:
    scheduler = FakeScheduler(run_dir)
    yield scheduler
    scheduler.stop()


@pytest.fixture
def api(fake: FakeScheduler, model_dir: Path, run_dir: Path) -> Iterator[RunningApi]:
    running = RunningApi(model_dir, run_dir)
    running.wait_ready()
    yield running
    running.stop()


@pytest.fixture
def client(api: RunningApi) -> Iterator[openai.OpenAI]:
    with api.client() as client:
        yield client


@pytest.fixture
def http(api: RunningApi) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=api.url, timeout=20) as http:
        yield http


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> object:
    from freetoken.api.tokenizer import Tokenizer

    return Tokenizer.load(model_dir)
