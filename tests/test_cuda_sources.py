"""The CUDA sources compile for the oldest and the newest architecture we name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from freetoken.kernels import cuda_library, pinned

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "cuda").glob("*.cu"))
NVCC = cuda_library.find_nvcc()


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_source_compiles_without_a_warning(source: Path, arch: str, tmp_path: Path) -> None:
    assert NVCC is not None
    command = [str(NVCC), "-std=c++17", "-Werror=all-warnings", "-cubin", f"-arch={arch}"]
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


def test_python_calls_what_the_sources_define() -> None:
    code = "".join(source.read_text() for source in SOURCES)
    defined = set(re.findall(r'extern "C" .*?\b(ft_\w+)\(', code))
    called = set(re.findall(r"\bft_\w+", Path(cuda_library.__file__).read_text()))
    assert called == defined


def test_constants_equal_their_twins() -> None:
    fetch = (ROOT / "cuda" / "fetch.cu").read_text()
    cases = re.findall(r"case (\d+):", fetch)
    assert sorted(map(int, cases)) == sorted(cuda_library.UNROLLS)
    register = (ROOT / "cuda" / "register.cu").read_text()
    assert "cudaHostRegisterMapped | cudaHostRegisterPortable" in register
    assert pinned.REGISTER_FLAGS == 0x02 | 0x01  # driver_types.h: mapped, portable
    assert cuda_library.FETCH_TUNING.unroll in cuda_library.UNROLLS
    assert cuda_library.FETCH_TUNING.chunk_bytes % 16 == 0
