"""`ft demo` tells what the model is and where."""

from __future__ import annotations

import fcntl
import signal
from pathlib import Path

import psutil
import pytest

from freetoken.commands.demo import run
from freetoken.errors import ConfigError
from tests.processes import ft, is_gone


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_build_that_a_server_asked_for_ends_with_it(tmp_path: Path, number: int) -> None:
    cache = tmp_path / "freetoken"
    (cache / "demo").mkdir(parents=True)
    with (cache / "demo" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the build waits for us
        with ft("serve", "--port", "0", XDG_CACHE_HOME=str(tmp_path)) as running:
            running.wait_for("another process builds in")
            (builder,) = psutil.Process(running.process.pid).children()
            running.process.send_signal(number)
            running.wait(5)
            assert is_gone(builder.pid, 3)


def test_unknown_options_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown option --whel, did you mean --wheel"):
        run(["--whel", "x"])
    with pytest.raises(ConfigError, match="unexpected argument 'x'"):
        run(["x"])
