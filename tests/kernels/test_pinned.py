"""Registration: on a GPU for real, elsewhere what it makes of CUDA's answers."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import pytest
import torch

from freetoken.kernels import cuda_library, pinned

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class FakeRuntime:
    """torch.cuda.cudart() of a machine that pins `limit` bytes at most."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, start: int, num_bytes: int, flags: int) -> int:
        assert flags == pinned.REGISTER_FLAGS
        if num_bytes > self.limit:
            return 2
        self.pinned[start] = num_bytes
        return 0

    def cudaHostUnregister(self, start: int) -> int:
        return 0 if self.pinned.pop(start, 0) else 713

    def cudaGetErrorString(self, code: int) -> str:
        return {2: "out of memory", 713: "not registered"}[code]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime(limit=4096)
    monkeypatch.setattr(cuda_library, "load", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(pinned, "_clear_error", lambda: None)
    return fake


def test_without_the_library_torchs_runtime_registers(runtime: FakeRuntime) -> None:
    memory = torch.zeros(2, 2048, dtype=torch.uint8)
    pinned.register(memory)
    assert runtime.pinned == {memory.data_ptr(): 4096}
    pinned.unregister(memory)
    assert not runtime.pinned


def test_refusal_gives_cudas_reason(runtime: FakeRuntime) -> None:
    with pytest.raises(RuntimeError, match="cudaHostRegister: out of memory"):
        pinned.register(torch.zeros(4097, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="cudaHostUnregister: not registered"):
        pinned.unregister(torch.zeros(1, dtype=torch.uint8))


def test_the_library_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    library = SimpleNamespace(
        register_host=lambda *call: calls.append(call),
        unregister_host=lambda *call: calls.append(call),
    )
    monkeypatch.setattr(cuda_library, "load", lambda: library)
    memory = torch.zeros(3, 16, dtype=torch.uint8)
    pinned.register(memory)
    pinned.unregister(memory)
    assert calls == [(memory.data_ptr(), 48), (memory.data_ptr(),)]


@pytest.mark.gpu
@needs_gpu
def test_mapped_memory_can_be_pinned_read_by_a_kernel_and_released() -> None:
    area = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    memory = torch.frombuffer(area, dtype=torch.uint8)
    memory.copy_(torch.arange(len(memory)) % 251)
    pinned.register(memory)
    assert memory.is_pinned()
    with pytest.raises(RuntimeError):
        pinned.register(memory)
    assert torch.equal(memory.cuda().cpu(), memory)
    pinned.unregister(memory)
    assert not memory.is_pinned()
