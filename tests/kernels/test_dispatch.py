"""What is settled before a Triton kernel is first compiled."""

from __future__ import annotations

import os

import pytest
import torch

from freetoken.kernels import dispatch


@pytest.fixture(autouse=True)
def _as_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.FUSION_VARIABLE, raising=False)
    dispatch.fuse_products.cache_clear()


def test_the_references_run_on_a_cpu_and_nothing_is_set_for_triton() -> None:
    assert not dispatch.use_triton(torch.zeros(1))
    assert dispatch.FUSION_VARIABLE not in os.environ


def test_triton_is_told_what_it_would_otherwise_warn_about() -> None:
    dispatch.fuse_products()
    assert os.environ[dispatch.FUSION_VARIABLE] == "1"


def test_the_user_s_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.FUSION_VARIABLE, "0")
    dispatch.fuse_products()
    assert os.environ[dispatch.FUSION_VARIABLE] == "0"
