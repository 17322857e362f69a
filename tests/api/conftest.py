"""One tiny model for the session, one scheduler and api for each module.

After every test the accounts must be back at their baseline: no sequence open, each submit ended.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from freetoken.api.tokenizer import Tokenizer
from tests.api.fake_scheduler import FakeScheduler
from tests.api.running import RunningApi
from tests.api.tiny_model import write_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny-model")


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short: the path of a socket holds 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="ft") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def served(model_dir: Path) -> Iterator[tuple[FakeScheduler, RunningApi]]:
    with tempfile.TemporaryDirectory(prefix="ft") as path:
        scheduler = FakeScheduler(Path(path))
        running = RunningApi(model_dir, Path(path))
        running.wait_ready()
        yield scheduler, running
        running.stop()
        scheduler.stop()


@pytest.fixture
def fake(served: tuple[FakeScheduler, RunningApi]) -> Iterator[FakeScheduler]:
    scheduler, running = served
    scheduler.reset()
    running.wait_ready()
    yield scheduler
    running.wait_idle()


@pytest.fixture
def api(served: tuple[FakeScheduler, RunningApi], fake: FakeScheduler) -> RunningApi:
    return served[1]


@pytest.fixture
def client(api: RunningApi) -> Iterator[openai.OpenAI]:
    with api.client() as client:
        yield client


@pytest.fixture
def http(api: RunningApi) -> httpx.Client:
    return api.http
