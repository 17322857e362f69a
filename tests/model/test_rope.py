"""Rope types whose frequencies depend on the longest position of a batch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from freetoken.errors import EngineError
from freetoken.model.load import load_model
from freetoken.model.served import ServedModel
from freetoken.model.trial import Part, Trial
from tests.model import tiny

ORIGINAL = 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [4.0 + i for i in range(8)],
    "original_max_position_embeddings": ORIGINAL,
    "factor": 4.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def make(path: Path, rope: dict[str, Any], max_positions: int) -> Any:
    config = tiny.make_config("llama")
    config.rope_parameters = rope
    config.max_position_embeddings = max_positions
    plain = tiny.make_model(config)
    tiny.save(plain, path)
    return plain


def load(path: Path, context_tokens: int | None) -> ServedModel:
    return load_model(
        path,
        dtype="float32",
        device="cpu",
        experts="in-place",
        num_slots=None,
        progress=lambda phase, done, total: None,
        context_tokens=context_tokens,
    )


def test_longrope_uses_the_short_factors_when_the_context_fits_the_original_window(
    tmp_path: Path,
) -> None:
    plain = make(tmp_path, LONGROPE, 4 * ORIGINAL)
    ids = tiny.random_ids(ORIGINAL, 0)
    trial = Trial(load(tmp_path, ORIGINAL), [ids])
    trial.step(Part(0, 10))
    trial.step(Part(0, 6))
    assert tiny.relative_error(trial.logits(0), tiny.plain_logits(plain, ids)) < 1e-4


def test_longrope_uses_the_long_factors_for_longer_contexts_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make(tmp_path, LONGROPE, 4 * ORIGINAL)
    ids = tiny.random_ids(3 * ORIGINAL, 0)
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path, None)
    assert "rope.long_factors context_tokens=64 original_window=16" in caplog.text
    trial = Trial(model, [ids])
    # The first step ends before the original window: the factors must not depend on it.
    trial.step(Part(0, 10))
    trial.step(Part(0, 38))
    assert tiny.relative_error(trial.logits(0), tiny.plain_logits(plain, ids)) < 1e-4


def test_dynamic_rope_is_constant_up_to_the_window(tmp_path: Path) -> None:
    plain = make(tmp_path, DYNAMIC, 32)
    ids = tiny.random_ids(32, 0)
    trial = Trial(load(tmp_path, None), [ids])
    trial.step(Part(0, 20))
    trial.step(Part(0, 12))
    assert tiny.relative_error(trial.logits(0), tiny.plain_logits(plain, ids)) < 1e-4


def test_dynamic_rope_beyond_the_window_is_refused(tmp_path: Path) -> None:
    make(tmp_path, DYNAMIC, 32)
    with pytest.raises(EngineError, match=r"dynamic cannot serve 33 tokens .* beyond 32"):
        load(tmp_path, 33)
