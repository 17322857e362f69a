"""compute-sanitizer finds nothing in the kernels of cuda/."""

from __future__ import annotations

import glob
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from freetoken.kernels import cuda_library

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("sanitize.cu")
FOUND = 9
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    nvcc = cuda_library.find_nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc")
    arch = "".join(map(str, torch.cuda.get_device_capability()))
    output = tmp_path_factory.mktemp("sanitize") / "sanitize"
    return build(nvcc, arch, output)


def build(nvcc: Path, arch: str, output: Path) -> Path:
    sources = [PROGRAM, *cuda_library.source_files()]
    command = [str(nvcc), "-lineinfo", "-std=c++17", f"-arch=sm_{arch}", "-o", str(output)]
    subprocess.run([*command, *map(str, sources)], check=True, timeout=TIMEOUT_S)
    return output


def find_sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer")
    if found:
        return found
    places = ("/usr/local/cuda*/bin/compute-sanitizer", "/opt/nvidia/**/compute-sanitizer")
    return next((path for place in places for path in glob.glob(place, recursive=True)), None)


def test_the_program_finds_the_functions_right(program: Path) -> None:
    done = subprocess.run([program], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "right\n"


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_the_sanitizer_finds_nothing(program: Path, tool: str) -> None:
    sanitizer = find_sanitizer()
    if sanitizer is None:
        pytest.skip("needs compute-sanitizer")
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if "not supported" in done.stdout:
        pytest.skip(f"{tool} does not run here: {done.stdout.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "right" in done.stdout
