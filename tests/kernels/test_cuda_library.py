"""Building and finding the library; calling it needs a GPU."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from freetoken.kernels import cuda_library
from freetoken.kernels.cuda_library import CudaError, CudaLibrary, FetchTuning

NVCC = cuda_library.find_nvcc()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert NVCC is not None
    return cuda_library.build(["90"], tmp_path_factory.mktemp("cuda"), NVCC)


def fake_nvcc(tmp_path: Path, script: str) -> Path:
    path = tmp_path / "nvcc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@needs_nvcc
def test_build_makes_a_library_with_every_function(built: Path) -> None:
    functions = ctypes.CDLL(str(built))
    for name in ("fetch_rows", "copy_rows", "register_host", "unregister_host", "device_pointer"):
        assert hasattr(functions, f"ft_{name}")
    assert [path.name for path in built.parent.iterdir() if path.name != ".lock"] == [built.name]


@needs_nvcc
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_library_without_a_gpu_says_what_is_wrong(built: Path) -> None:
    with pytest.raises(CudaError, match="ft_check_device: cudaError"):
        CudaLibrary(built)


def test_build_leaves_what_is_there(tmp_path: Path) -> None:
    nvcc = fake_nvcc(
        tmp_path,
        f"echo called >> {tmp_path}/calls; for o; do :; done; touch_out()"
        '{ while [ "$1" != "-o" ]; do shift; done; echo x > "$2"; }; touch_out "$@"',
    )
    first = cuda_library.build(["90"], tmp_path / "out", nvcc)
    assert cuda_library.build(["90"], tmp_path / "out", nvcc) == first
    assert (tmp_path / "calls").read_text() == "called\n"
    assert first.name == f"freetoken-{cuda_library.source_hash()}-90.so"


def test_failed_build_leaves_no_file(tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path, "echo 'no such GPU' >&2; exit 3")
    with pytest.raises(subprocess.CalledProcessError) as failure:
        cuda_library.build(["90"], tmp_path / "out", nvcc)
    assert "no such GPU" in failure.value.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def test_library_for_all_gpus_holds_code_for_each_and_for_those_to_come() -> None:
    command = cuda_library.compile_command(Path("nvcc"), cuda_library.ALL_ARCHS, Path("out.so"))
    for arch in ("80", "86", "89", "90", "100", "120"):
        assert f"-gencode=arch=compute_{arch},code=sm_{arch}" in command
    assert "-gencode=arch=compute_120,code=compute_120" in command
    one = cuda_library.compile_command(Path("nvcc"), ["89"], Path("out.so"))
    assert [option for option in one if "gencode" in option] == [
        "-gencode=arch=compute_89,code=sm_89"
    ]


def test_sources_of_a_wheel_come_before_a_package_named_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = cuda_library._SOURCE_DIRS
    assert (first.name, second.name) == ("_cuda", "cuda")
    ours, theirs = tmp_path / "_cuda", tmp_path / "cuda"
    theirs.mkdir()
    monkeypatch.setattr(cuda_library, "_SOURCE_DIRS", (ours, theirs))
    assert cuda_library.source_files() == []
    ours.mkdir()
    (ours / "fetch.cu").touch()
    assert cuda_library.source_files() == [ours / "fetch.cu"]


def test_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cuda_library.cache_dir() == Path("/somewhere/freetoken/cuda")


def test_nvcc_of_cuda_home_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    nvcc = fake_nvcc(tmp_path / "bin", "exit 0")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert cuda_library.find_nvcc() == nvcc


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_there_is_no_library() -> None:
    assert cuda_library.load() is None


@pytest.mark.gpu
@needs_gpu
@needs_nvcc
@pytest.mark.parametrize("unroll", cuda_library.UNROLLS)
@pytest.mark.parametrize("row_bytes", [16, 272, 16384, 100_000 // 16 * 16])
@pytest.mark.parametrize("num_fetch", [0, 1, 7])
def test_fetch_copies_the_listed_rows(unroll: int, row_bytes: int, num_fetch: int) -> None:
    library = cuda_library.load()
    assert library is not None
    if unroll == 0 and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs sm_90")
    bank = torch.randint(0, 256, (9, row_bytes), dtype=torch.uint8).pin_memory()
    pool = torch.zeros(12, row_bytes, dtype=torch.uint8, device="cuda")
    experts = torch.tensor([8, 0, 3, 3, 5, 1, 7], dtype=torch.int32, device="cuda")
    rows = torch.tensor([11, 2, 0, 1, 7, 9, 4], dtype=torch.int32, device="cuda")
    count = torch.tensor([num_fetch], dtype=torch.int32, device="cuda")
    tuning = FetchTuning(num_blocks=5, unroll=unroll, chunk_bytes=4096)
    library.fetch_rows(bank, pool, experts, rows, count, tuning)
    expected = torch.zeros(12, row_bytes, dtype=torch.uint8)
    for expert, row in zip(experts.tolist()[:num_fetch], rows.tolist()[:num_fetch], strict=True):
        expected[row] = bank[expert]
    assert torch.equal(pool.cpu(), expected)


@pytest.mark.gpu
@needs_gpu
@needs_nvcc
def test_copy_rows_copies_runs_and_single_rows_both_ways() -> None:
    library = cuda_library.load()
    assert library is not None
    bank = torch.randint(0, 256, (9, 272), dtype=torch.uint8).pin_memory()
    pool = torch.zeros(9, 272, dtype=torch.uint8, device="cuda")
    moves = [(0, 3), (1, 4), (2, 5), (7, 0), (8, 8)]
    library.copy_rows(bank, pool, moves)
    library.copy_rows(pool, pool, [(3, 6)])
    library.copy_rows(bank, pool, [])
    expected = torch.zeros(9, 272, dtype=torch.uint8)
    for source, target in [*moves, (0, 6)]:
        expected[target] = bank[source]
    assert torch.equal(pool.cpu(), expected)


@pytest.mark.gpu
@needs_gpu
@needs_nvcc
def test_wrong_sizes_are_refused() -> None:
    library = cuda_library.load()
    assert library is not None
    bank = torch.zeros(2, 24, dtype=torch.uint8).pin_memory()
    pool = bank.cuda()
    count = torch.zeros(1, dtype=torch.int32, device="cuda")
    with pytest.raises(CudaError, match="ft_fetch_rows: cudaErrorInvalidValue"):
        library.fetch_rows(bank, pool, count, count, count)
    with pytest.raises(CudaError, match="ft_device_pointer"):
        library.device_pointer(torch.zeros(8))
