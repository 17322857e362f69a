"""The CUDA sources compile for the oldest and the newest architecture we name."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = sorted((Path(__file__).parent.parent / "cuda").glob("*.cu"))
NVCC = shutil.which("nvcc")


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_source_compiles_without_a_warning(source: Path, arch: str, tmp_path: Path) -> None:
    assert NVCC is not None
    command = [NVCC, "-std=c++17", "-Werror=all-warnings", "-cubin", f"-arch={arch}"]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "out.cubin"), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_there_are_sources_and_they_include_no_torch() -> None:
    assert SOURCES
    assert all("torch/" not in source.read_text() for source in SOURCES)
