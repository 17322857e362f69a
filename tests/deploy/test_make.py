"""The Makefile, and the wheel that is built from the repository."""

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.processes import ROOT, clean_environment

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(directory: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """make in a clone without an environment; the flags of a make around us do not count."""
    shutil.copy(ROOT / "Makefile", directory)
    for name in ("pyproject.toml", "constraints.txt"):
        (directory / name).touch()
    env = {key: value for key, value in clean_environment(**environ).items() if "MAKE" not in key}
    env.pop("PYTHON", None)
    return subprocess.run(
        ["make", *arguments], cwd=directory, env=env, capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def old_python(tmp_path: Path) -> Path:
    """An interpreter that says it is 3.10.13."""
    path = tmp_path / "python3.10"
    path.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c \'import sys; sys.executable = "python3.10"; '
        'sys.version_info = (3, 10, 13, "final", 0); exec(sys.argv[1])\' "$2"\n'
    )
    path.chmod(0o755)
    return path


@needs_make
@pytest.mark.parametrize("target", ["serve", "test", "check", "setup"])
def test_an_older_python_is_refused_by_name(tmp_path: Path, old_python: Path, target: str) -> None:
    done = make(tmp_path, f"PYTHON={old_python}", target)
    assert done.returncode != 0
    assert "needs Python 3.11 or newer; python3.10 is 3.10.13" in done.stderr
    assert not (tmp_path / ".venv").exists()


@needs_make
def test_an_older_python_is_refused_though_an_environment_is_there(
    tmp_path: Path, old_python: Path
) -> None:
    (tmp_path / ".venv").mkdir()
    for name in ("pyproject.toml", "constraints.txt", ".venv/.made", ".venv/.runtime"):
        (tmp_path / name).touch()
    done = make(tmp_path, f"PYTHON={old_python}", "-j4", "setup")
    assert "needs Python 3.11 or newer" in done.stderr


@needs_make
@pytest.mark.parametrize("jobs", ["-j1", "-j8"])
def test_pip_arguments_reach_every_installation(tmp_path: Path, jobs: str) -> None:
    done = make(tmp_path, "-n", jobs, "PIP_ARGS=--index-url=x", "check", "test", "ARGS=-x")
    assert done.returncode == 0, done.stderr
    installs = [line for line in done.stdout.splitlines() if " install " in line]
    assert len(installs) == 1
    assert "--index-url=x -c constraints.txt -e '.[dev]'" in installs[0]
    last = done.stdout.splitlines()[-1]
    assert last == ".venv/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -x"


@needs_make
def test_what_is_installed_for_tests_is_enough_to_serve(tmp_path: Path) -> None:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/.made").touch()
    for name in ("python", "ft"):
        (tmp_path / ".venv/bin" / name).symlink_to("/bin/true")
    done = make(tmp_path, "test", "serve")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" install ") == 1


@needs_make
def test_byte_code_is_kept_whatever_the_environment_says(tmp_path: Path) -> None:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/.made").touch()
    python = tmp_path / ".venv/bin/python"
    python.write_text('#!/bin/sh\necho "$2 dont_write=$PYTHONDONTWRITEBYTECODE"\n')
    python.chmod(0o755)
    done = make(tmp_path, "test", PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 0, done.stderr
    assert "pytest dont_write=\n" in done.stdout


@needs_make
def test_serve_needs_no_tools_for_developers(tmp_path: Path) -> None:
    done = make(tmp_path, "-n", "serve", "ARGS=m --port 1")
    assert "[dev]" not in done.stdout
    assert done.stdout.splitlines()[-1] == ".venv/bin/ft serve m --port 1"


@needs_make
def test_every_environment_is_cleaned_away(tmp_path: Path) -> None:
    for name in (".venv", ".venv-oldest"):
        (tmp_path / name).mkdir()
    assert make(tmp_path, "clean").returncode == 0
    assert not [path.name for path in tmp_path.iterdir() if path.is_dir()]


@pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="needs hatchling")
def test_the_wheel_holds_all_that_is_needed_and_no_more(tmp_path: Path) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", str(ROOT), "-w", str(tmp_path), "--no-deps"),
            *("--no-build-isolation", "--quiet", "--disable-pip-version-check"),
        ],
        check=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("freetoken-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = next(name for name in names if name.endswith("entry_points.txt"))
        assert "ft = freetoken.cli:main" in archive.read(entry_points).decode()
    for needed in ("freetoken/py.typed", "freetoken/demo/router_8x2.safetensors"):
        assert needed in names
    sources = {f"freetoken/_cuda/{path.name}" for path in (ROOT / "cuda").iterdir()}
    assert sources <= names
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "freetoken").rglob("*.py")}
    assert modules == {name for name in names if name.endswith(".py")}
    assert not any(name.startswith(("tests", "tools", "deploy")) for name in names)
