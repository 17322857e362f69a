"""`ft demo` tells what the model is and where."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetoken.commands.demo import run
from freetoken.errors import ConfigError


def test_print_path_prints_nothing_else(demo_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--print-path"]) == 0
    assert capsys.readouterr().out == f"{demo_dir}\n"


def test_it_says_plainly_what_the_model_is(
    demo_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([]) == 0
    text = capsys.readouterr().out
    assert "replicated experts and fitted routers, not a trained MoE" in text
    assert f"path    {demo_dir}" in text
    assert "size    1.39 GB" in text or "size    1.38 GB" in text


def test_a_wheel_that_is_not_there_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="--wheel nowhere"):
        run(["--wheel", "nowhere"])


def test_unknown_options_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown option --whel, did you mean --wheel"):
        run(["--whel", "x"])
    with pytest.raises(ConfigError, match="unexpected argument 'x'"):
        run(["x"])
