"""Serving with --api-key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.running import RunningApi

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def keyed(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApi]:
    run_dir = tmp_path_factory.mktemp("k")
    running = RunningApi(model_dir, run_dir, names=("a", "b"), api_key="sésame")
    yield running
    running.stop()


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", "Basic sésame", "sésame", "Bearer sésam"]
)
def test_requests_without_the_key_are_401(keyed: RunningApi, header: str | None) -> None:
    headers = [] if header is None else [(b"authorization", header.encode())]
    response = keyed.http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert "sésame" not in response.text


def test_the_key_passes(keyed: RunningApi) -> None:
    headers = [(b"authorization", "Bearer sésame".encode())]
    models = keyed.http.get("/v1/models", headers=headers).json()["data"]
    assert [model["id"] for model in models] == ["a", "b"]


def test_health_and_metrics_need_no_key(keyed: RunningApi) -> None:
    assert keyed.http.get("/health/live").status_code == 200
    assert keyed.http.get("/metrics").status_code == 200
