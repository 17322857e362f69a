"""The memory of a model's expert banks: one memfd of exact size, which can outlive the worker.

A header says whose rows these are (BankIdentity) and, in a byte per layer, which layers are
complete; then come the rows of all layers. Whoever keeps the descriptor keeps the memory: a worker
that is started again maps it instead of reading the checkpoint. Knows neither who keeps it nor how
it is filled (the model room does that, in several threads), nor CUDA.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass

import torch

from freetoken import log
from freetoken.errors import EngineError
from freetoken.experts.layout import LAYOUT_VERSION, ExpertLayout

MAGIC = b"ftbank01"
LENGTH_BYTES = 4
PAGE_BYTES = mmap.PAGESIZE
BLOCK_BYTES = 512
"""The unit of st_blocks, whatever the page."""
NAME = "freetoken-bank"
RESERVE_BYTES = 64 << 20
"""Taken from the system in one call, between which signals are heard."""
MFD_NOEXEC_SEAL = 8
"""Linux 6.3; some systems refuse memfds without it."""
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 0
GIB = 1 << 30

_log = log.get(__name__)


@dataclass(frozen=True, slots=True)
class BankLayer:
    """The bank of one layer: its module's name, and what its rows are."""

    name: str
    num_experts: int
    layout: ExpertLayout

    @property
    def num_bytes(self) -> int:
        return self.num_experts * self.layout.row_bytes


@dataclass(frozen=True, slots=True)
class BankIdentity:
    """What banks hold. `checkpoint`: a digest of all that their contents depend on."""

    checkpoint: str
    layers: tuple[BankLayer, ...]

    def encode(self) -> bytes:
        """JSON; equal identities give equal bytes."""
        layers = [[la.name, la.num_experts, la.layout.to_data()] for la in self.layers]
        data = {"version": LAYOUT_VERSION, "checkpoint": self.checkpoint, "layers": layers}
        return json.dumps(data, sort_keys=True).encode()

    @property
    def digest(self) -> str:
        """64 hexadecimal digits."""
        return hashlib.sha256(self.encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Of memory: the rows of all layers and the header."""
        return _Places.of(self).size_bytes


@dataclass(frozen=True, slots=True)
class _Places:
    """Offsets in the memory: of the filled bytes, of each layer's rows, of the end."""

    filled: int
    layers: tuple[int, ...]
    size_bytes: int

    @classmethod
    def of(cls, identity: BankIdentity) -> _Places:
        filled = len(MAGIC) + LENGTH_BYTES + len(identity.encode())
        offset = _page_end(filled + len(identity.layers))
        layers = []
        for layer in identity.layers:
            layers.append(offset)
            # Whole pages, so that each layer can be pinned by itself.
            offset = _page_end(offset + layer.num_bytes)
        return cls(filled, tuple(layers), offset)


class BankMemory:
    """Rows of all layers. Layers may be filled in different threads.

    `fd`: owned by this object; None where the system has no memfds, then nobody can keep it.
    The memory is mapped as long as a tensor of `rows` lives.
    """

    def __init__(self, identity: BankIdentity, fd: int | None, mapped: mmap.mmap) -> None:
        self.identity = identity
        self.fd = fd
        self._map = mapped
        self._places = _Places.of(identity)

    @classmethod
    def create(cls, identity: BankIdentity) -> BankMemory:
        """No layer is filled, and no more is taken from the system than the header.

        Raises EngineError where so much cannot even be named.
        """
        size = _Places.of(identity).size_bytes
        fd = _create_memfd(size)
        try:
            mapped = mmap.mmap(-1 if fd is None else fd, size)
        except OSError as error:
            raise EngineError(_shortage(0, size, error)) from error
        _advise(mapped)
        memory = cls(identity, fd, mapped)
        memory._take(0, memory._places.layers[0] if identity.layers else size)
        header = _header(identity)
        mapped[: len(header)] = header
        return memory

    @classmethod
    def attach(cls, fd: int, identity: BankIdentity) -> BankMemory | None:
        """The memory that was created for the same identity; None if `fd` is anything else.

        Takes `fd` over when it returns a memory.
        """
        size = _Places.of(identity).size_bytes
        header = _header(identity)
        try:
            if os.fstat(fd).st_size != size or os.pread(fd, len(header), 0) != header:
                return None
            mapped = mmap.mmap(fd, size)
        except (OSError, ValueError):
            return None
        _advise(mapped)
        return cls(identity, fd, mapped)

    def reserve(self, layer: int) -> None:
        """Take the memory of a layer, so that a shortage is an error here and not a SIGBUS later.

        What is there stays. At 3 to 4 GiB/s, in several threads together: the system takes memory
        for one file at a time (Zen 5, Linux 6.18, 2026-12-01). Raises EngineError.
        """
        starts = (*self._places.layers, self._places.size_bytes)
        self._take(starts[layer], starts[layer + 1])

    def _take(self, start: int, end: int) -> None:
        if self.fd is None:
            return
        for offset in range(start, end, RESERVE_BYTES):
            try:
                os.posix_fallocate(self.fd, offset, min(RESERVE_BYTES, end - offset))
            except OSError as error:
                raise EngineError(_shortage(offset, self._places.size_bytes, error)) from error

    def rows(self, layer: int) -> torch.Tensor:
        """[E, row_bytes] uint8 cpu, page aligned: the memory itself, no copy."""
        this = self.identity.layers[layer]
        flat = torch.frombuffer(
            self._map,
            dtype=torch.uint8,
            count=this.num_bytes,
            offset=self._places.layers[layer],
        )
        return flat.view(this.num_experts, this.layout.row_bytes)

    def is_filled(self, layer: int) -> bool:
        return self._map[self._places.filled + layer] == 1

    def mark_filled(self, layer: int) -> None:
        """Every row of the layer has been written: a later worker may use it as it is."""
        self._map[self._places.filled + layer] = 1

    @property
    def taken_bytes(self) -> int:
        """What the system has given for it so far, as far as that is known."""
        layers = enumerate(self.identity.layers)
        filled = sum(layer.num_bytes for index, layer in layers if self.is_filled(index))
        blocks = 0 if self.fd is None else os.fstat(self.fd).st_blocks
        return max(filled, blocks * BLOCK_BYTES)

    @property
    def num_filled(self) -> int:
        return sum(self.is_filled(layer) for layer in range(len(self.identity.layers)))

    @property
    def is_whole(self) -> bool:
        return self.num_filled == len(self.identity.layers)

    def close(self) -> None:
        """Let go of the descriptor; tensors stay good."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _header(identity: BankIdentity) -> bytes:
    text = identity.encode()
    return MAGIC + len(text).to_bytes(LENGTH_BYTES, "little") + text


def _create_memfd(size_bytes: int) -> int | None:
    """A memfd that can neither shrink nor grow; None where there is none to be had."""
    fd = None
    for more in (MFD_NOEXEC_SEAL, 0):
        with suppress(OSError, AttributeError):
            fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | more)
            break
    if fd is None:
        _log.warning(log.event("bank.unkept", why="the system has no memfds"))
        return None
    try:
        os.ftruncate(fd, size_bytes)
    except OSError as error:
        os.close(fd)
        raise EngineError(_shortage(0, size_bytes, error)) from error
    with suppress(OSError):  # a mapping of what shrinks would end in a SIGBUS
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


def _advise(mapped: mmap.mmap) -> None:
    """Huge pages where shared memory may have them (shmem_enabled), no copy in crash dumps."""
    for advice in ("MADV_HUGEPAGE", "MADV_DONTDUMP"):
        if hasattr(mmap, advice):
            with suppress(OSError):
                mapped.madvise(getattr(mmap, advice))


def _shortage(taken_bytes: int, size_bytes: int, error: OSError) -> str:
    why = errno.errorcode.get(error.errno or 0, "unknown")
    return (
        f"the system gave {taken_bytes / GIB:.2f} of {size_bytes / GIB:.2f} GiB for the expert "
        f"banks ({why}: {error.strerror}); free memory, raise the limit of the container, or "
        "serve a smaller model"
    )


def _page_end(offset: int) -> int:
    return -(-offset // PAGE_BYTES) * PAGE_BYTES
