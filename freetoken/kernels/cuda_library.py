"""The kernels in cuda/, loaded through ctypes; built with nvcc when first needed.

A library is named after what it was built from: `freetoken-<hash of the sources>-<arch>.so`. It is
looked for in the user's cache and where `make cuda` leaves one for all architectures; else it is
built for the present GPU, which takes some seconds, once. Without nvcc there is none, and Triton
serves. The static CUDA runtime in it shares torch's context and streams.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from freetoken import log
from freetoken.log import event

# Whole numbers are SASS for that architecture; the last two come as PTX, too, for those to come.
ALL_ARCHS = ("80", "86", "89", "90", "100", "120")
PTX_ARCHS = ("90", "120")
BUILD_TIMEOUT_S = 600
_PACKAGE = Path(__file__).parent.parent
# In an installed wheel, where the second may be somebody else's package, and in a repository.
_SOURCE_DIRS = (_PACKAGE / "_cuda", _PACKAGE.parent / "cuda")

_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class FetchTuning:
    """num_blocks: of 256 threads, each copying chunk_bytes at a time · unroll: 16-byte loads that
    a thread has in flight, of UNROLLS; 0 for the copy unit of sm_90 and later, with one thread a
    block and stages of 16 KiB."""

    num_blocks: int = 64
    unroll: int = 4
    chunk_bytes: int = 32768


FETCH_TUNING = FetchTuning()
# Twins of the cases in cuda/fetch.cu.
UNROLLS = (0, 1, 2, 4, 8)


class CudaError(RuntimeError):
    """A function of the library has failed."""


class CudaLibrary:
    """The functions of cuda/*.cu, on tensors. Kernels run on the current stream."""

    def __init__(self, path: Path) -> None:
        """OSError if `path` cannot be loaded, CudaError if it has no code for this GPU."""
        self.path = path
        self._functions = ctypes.CDLL(str(path))
        self._functions.ft_error_name.restype = ctypes.c_char_p
        self._call("ft_check_device")

    def fetch_rows(
        self,
        bank_rows: torch.Tensor,
        pool_rows: torch.Tensor,
        experts: torch.Tensor,
        rows: torch.Tensor,
        num_rows: torch.Tensor,
        tuning: FetchTuning = FETCH_TUNING,
    ) -> None:
        """Copy bank row experts[i] to pool row rows[i] for i < num_rows; may be captured.

        bank_rows: [E, row_bytes] uint8 pinned · pool_rows: [·, row_bytes] uint8 cuda · experts,
        rows, num_rows: int32 cuda · row_bytes: a multiple of 16.
        """
        self._call(
            "ft_fetch_rows",
            ctypes.c_void_p(self.device_pointer(bank_rows)),
            ctypes.c_void_p(pool_rows.data_ptr()),
            ctypes.c_void_p(experts.data_ptr()),
            ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_void_p(num_rows.data_ptr()),
            ctypes.c_int64(bank_rows.shape[1]),
            ctypes.c_int32(tuning.chunk_bytes),
            ctypes.c_int32(tuning.num_blocks),
            ctypes.c_int32(tuning.unroll),
            _current_stream(pool_rows),
        )

    def copy_rows(
        self, source: torch.Tensor, target: torch.Tensor, moves: Sequence[tuple[int, int]]
    ) -> None:
        """Start copying row a of `source` to row b of `target` for each (a, b); not for capture.

        source, target: [·, row_bytes] uint8, on a GPU or pinned, at least one of them on a GPU.
        """
        row_bytes = source.shape[1]
        pointers = ctypes.c_void_p * len(moves)
        first_source, first_target = source.data_ptr(), target.data_ptr()
        self._call(
            "ft_copy_rows",
            pointers(*(first_source + row * row_bytes for row, _ in moves)),
            pointers(*(first_target + row * row_bytes for _, row in moves)),
            ctypes.c_int64(len(moves)),
            ctypes.c_int64(row_bytes),
            _current_stream(target if target.is_cuda else source),
        )

    def register_host(self, start: int, num_bytes: int) -> None:
        """Pin and map `num_bytes` of this process's memory at `start`."""
        self._call("ft_register_host", ctypes.c_void_p(start), ctypes.c_size_t(num_bytes))

    def unregister_host(self, start: int) -> None:
        """Undo register_host."""
        self._call("ft_unregister_host", ctypes.c_void_p(start))

    def device_pointer(self, tensor: torch.Tensor) -> int:
        """Where the GPU sees a tensor that is pinned or its own."""
        if tensor.is_cuda:
            return tensor.data_ptr()
        pointer = ctypes.c_void_p()
        host = ctypes.c_void_p(tensor.data_ptr())
        self._call("ft_device_pointer", host, ctypes.byref(pointer))
        assert pointer.value is not None
        return pointer.value

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._functions, name)(*arguments)
        if code != 0:
            raise CudaError(f"{name}: {self._functions.ft_error_name(code).decode()}")


@cache
def load() -> CudaLibrary | None:
    """The library for the current GPU, found or built; None, with the reason in the log, if there
    is no GPU, no nvcc, or the build fails."""
    if not torch.cuda.is_available():
        return None
    arch = "".join(map(str, torch.cuda.get_device_capability()))
    tag = source_hash()
    for directory in (cache_dir(), make_dir()):
        for name in (arch, "all"):
            library = _open(directory / f"freetoken-{tag}-{name}.so")
            if library is not None:
                return library
    nvcc = find_nvcc()
    if nvcc is None:
        _log.info(event("cuda.absent", reason="no nvcc; Triton serves"))
        return None
    try:
        path = build([arch], cache_dir(), nvcc)
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning(event("cuda.absent", reason=f"build failed: {_last_line(error)}"))
        return None
    return _open(path)


def build(archs: Sequence[str], directory: Path, nvcc: Path) -> Path:
    """Build the library for `archs` ("90", …) in `directory`, unless it is there.

    One process builds, others wait for it; the file appears when complete. Raises OSError and
    subprocess.SubprocessError.
    """
    name = archs[0] if len(archs) == 1 else "all"
    path = directory / f"freetoken-{source_hash()}-{name}.so"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path
        with tempfile.TemporaryDirectory(dir=directory, prefix=".building-") as building:
            output = Path(building) / path.name
            command = compile_command(nvcc, archs, output)
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
            )
            output.replace(path)
    _log.info(event("cuda.built", path=path))
    return path


def compile_command(nvcc: Path, archs: Sequence[str], output: Path) -> list[str]:
    """How to make the library; PTX only when it is for more than one architecture."""
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    if len(archs) > 1:
        ptx = [arch for arch in archs if arch in PTX_ARCHS]
        codes += [f"-gencode=arch=compute_{arch},code=compute_{arch}" for arch in ptx]
    options = ["-O3", "-std=c++17", "-shared", "-Xcompiler=-fPIC", "--threads=0"]
    return [str(nvcc), *options, *codes, "-o", str(output), *map(str, source_files())]


def source_files() -> list[Path]:
    """cuda/*.cu, from the repository or the installed package."""
    directory = next(path for path in _SOURCE_DIRS if path.is_dir())
    return sorted(directory.glob("*.cu"))


def source_hash() -> str:
    """What names a library: of the sources' names and contents."""
    digest = hashlib.sha256()
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/freetoken/cuda`, by default below `~/.cache`."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if home else Path.home() / ".cache") / "freetoken" / "cuda"


def make_dir() -> Path:
    """Where `make cuda` leaves its library."""
    return _PACKAGE.parent / "build" / "cuda"


def find_nvcc() -> Path | None:
    """nvcc of $CUDA_HOME, of the PATH, or of the usual place."""
    home = os.environ.get("CUDA_HOME")
    places = [Path(home) / "bin" / "nvcc"] if home else []
    found = shutil.which("nvcc")
    places += [Path(found)] if found else []
    places.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((path for path in places if path.is_file()), None)


def _open(path: Path) -> CudaLibrary | None:
    if not path.is_file():
        return None
    try:
        library = CudaLibrary(path)
    except (OSError, AttributeError, CudaError) as error:
        _log.warning(event("cuda.unusable", path=path, reason=_last_line(error)))
        return None
    _log.info(event("cuda.loaded", path=path))
    return library


def _last_line(error: Exception) -> str:
    """What nvcc said last, or the error itself."""
    said = getattr(error, "stderr", None) or str(error)
    return str(said).strip().splitlines()[-1]


def _current_stream(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream(tensor.device).cuda_stream)
