import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from freetoken.errors import ConfigError
from freetoken.launcher import rundir


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short: sockets lie in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield Path(directory)


def make_old(path: Path) -> Path:
    path.mkdir(mode=0o700)
    (path / rundir.CONFIG).touch()
    os.utime(path, (0, 0))
    return path


def test_a_fresh_directory_is_private_and_gone_afterwards(base: Path) -> None:
    with rundir.launcher_dir(None) as path:
        assert path.parent == base
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        rundir.write_private(path / rundir.CONFIG, "api_key = 'x'")
        assert stat.S_IMODE((path / rundir.CONFIG).stat().st_mode) == 0o600
        (path / "api.sock").touch()
    assert list(base.iterdir()) == []


def test_a_given_directory_stays_and_keeps_what_is_not_ours(base: Path) -> None:
    with rundir.launcher_dir(base / "mine") as path:
        for name in ("api.sock", "worker.sock", "beats.sock", rundir.CONFIG, "notes"):
            (path / name).touch()
    assert [file.name for file in (base / "mine").iterdir()] == ["notes"]


def test_a_directory_in_use_is_refused_and_names_its_holder(base: Path) -> None:
    with (
        rundir.launcher_dir(base / "mine"),
        pytest.raises(ConfigError, match=f"in use by another server .pid {os.getpid()}."),
        rundir.launcher_dir(base / "mine"),
    ):
        pass


def test_only_directories_of_killed_launchers_are_swept(base: Path) -> None:
    prefix = f"{rundir.PREFIX}{os.getuid()}-"
    stale = make_old(base / f"{prefix}stale")
    young = base / f"{prefix}young"
    young.mkdir()
    foreign = make_old(base / "else-1")
    with rundir.launcher_dir(None) as live:
        os.utime(live, (0, 0))
        rundir.sweep(base)
        assert live.exists()
        assert not stale.exists()
        assert young.exists()
        assert foreign.exists()


def test_a_path_too_long_for_a_socket_is_refused_and_leaves_nothing(base: Path) -> None:
    with pytest.raises(ConfigError, match="choose a shorter --run-dir"):
        rundir.prepare(base / ("x" * 120))
    assert list(base.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_refused(base: Path) -> None:
    (base / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot make run directory .*: (Not a dir|File exists)"):
        rundir.prepare(base / "file")


def test_the_shared_directory_is_fixed_and_names_the_user_in_tmp(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rundir.shared_dir() == base / "freetoken"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    assert rundir.shared_dir() == Path(f"/tmp/freetoken-{os.getuid()}")
