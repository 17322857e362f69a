"""Reads tensors of safetensors files, from several threads at once.

By read(2) into a buffer that each thread uses again: unlike a mapped file it takes no page faults,
and what it holds in memory is known. Called by the loader.
"""

from __future__ import annotations

import mmap
import os
import threading
from math import prod
from pathlib import Path
from types import TracebackType

import torch

from freetoken.errors import ConfigError
from freetoken.model.checkpoint import FLOAT_DTYPES, StoredTensor

DTYPES = FLOAT_DTYPES | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
ALIGNMENT_BYTES = 64
MAX_BUFFER_BYTES = 64 << 20
"""A larger tensor gets memory of its own, which is given back with it."""
READ_BYTES = 1 << 30
"""read(2) takes no more than 2 GiB at a time."""


class TensorReader:
    """A context manager that closes its files. Threads may share it.

    A tensor is good until its thread calls `start_over`.
    """

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def start_over(self) -> None:
        """What this thread has read so far is not needed any more."""
        self._local.used = 0

    def read(self, stored: StoredTensor, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """The tensor, or the rows `[lo, hi)` of its first dimension, cpu."""
        dtype, shape, offset, size = _extent(stored, rows)
        if not size:
            return torch.empty(shape, dtype=dtype)
        buffer, start = self._take(size)
        self._fill(stored, memoryview(buffer)[start : start + size], offset)
        count = size // dtype.itemsize
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=start).view(shape)

    def read_into(
        self, stored: StoredTensor, target: torch.Tensor, rows: tuple[int, int] | None = None
    ) -> None:
        """Like `read`, straight into the contiguous uint8 tensor `target` of the same bytes."""
        _, _, offset, size = _extent(stored, rows)
        assert target.nbytes == size
        if size:
            self._fill(stored, target.numpy().data, offset)

    def _take(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        """Memory for a tensor: a buffer and where in it."""
        if num_bytes > MAX_BUFFER_BYTES:
            return mmap.mmap(-1, num_bytes), 0
        start = -(-getattr(self._local, "used", 0) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        buffer: mmap.mmap | None = getattr(self._local, "buffer", None)
        if buffer is None or start + num_bytes > len(buffer):
            # Tensors in the old one keep it; the next round finds this one large enough.
            buffer, start = mmap.mmap(-1, min(2 * (start + num_bytes), MAX_BUFFER_BYTES)), 0
            self._local.buffer = buffer
        self._local.used = start + num_bytes
        return buffer, start

    def _fill(self, stored: StoredTensor, target: memoryview, offset: int) -> None:
        fd = self._open(stored.file)
        while target:
            try:
                count = os.preadv(fd, [target[:READ_BYTES]], offset)
            except OSError as error:
                raise ConfigError(f"cannot read shard {stored.file}: {error.strerror}") from error
            if not count:
                raise ConfigError(f"shard {stored.file} ends within tensor {stored.key}")
            target, offset = target[count:], offset + count

    def _open(self, file: Path) -> int:
        with self._lock:
            fd = self._files.get(file)
            if fd is None:
                try:
                    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise ConfigError(f"cannot read shard {file}: {error.strerror}") from error
                self._files[file] = fd
            return fd


def _extent(
    stored: StoredTensor, rows: tuple[int, int] | None
) -> tuple[torch.dtype, tuple[int, ...], int, int]:
    """Type, shape, offset in the file and bytes of the tensor, or of some of its rows."""
    dtype = _dtype_of(stored)
    shape, offset, size = stored.shape, stored.offset_bytes, stored.num_bytes
    if rows is not None:
        lo, hi = rows
        row_bytes = size // shape[0]
        shape = (hi - lo, *shape[1:])
        offset, size = offset + lo * row_bytes, (hi - lo) * row_bytes
    return dtype, shape, offset, size


def _dtype_of(stored: StoredTensor) -> torch.dtype:
    """ConfigError if we do not know the type, or the size is not that of the shape."""
    dtype = DTYPES.get(stored.dtype)
    if dtype is None:
        raise ConfigError(
            f"cannot read shard {stored.file}: tensor {stored.key} is stored as {stored.dtype}"
        )
    needed = prod(stored.shape) * dtype.itemsize
    if needed != stored.num_bytes:
        raise ConfigError(
            f"cannot read shard {stored.file}: tensor {stored.key} of {stored.num_bytes} bytes, "
            f"its shape {stored.shape} as {stored.dtype} needs {needed}"
        )
    return dtype
