"""Bank memory: what is written is there for whoever maps it again, and for nobody else."""

from __future__ import annotations

import os
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from freetoken.errors import EngineError
from freetoken.experts.bank import RowBank
from freetoken.experts.layout import ALIGNMENT_BYTES, ExpertLayout
from freetoken.experts.shared import PAGE_BYTES, BankIdentity, BankLayer, BankMemory
from tests.processes import run_python

LAYOUT = ExpertLayout.plan({"up_proj": (10, 24), "down_proj": (24, 10)}, torch.float32)
WIDE = ExpertLayout.plan({"up_proj": (12, 24), "down_proj": (24, 12)}, torch.bfloat16)


def identity_of(checkpoint: str = "a", num_layers: int = 3) -> BankIdentity:
    layers = [BankLayer(f"layers.{i}.experts", 4, LAYOUT) for i in range(num_layers)]
    return BankIdentity(checkpoint, (*layers, BankLayer("last.experts", 5, WIDE)))


def fill(memory: BankMemory, layer: int) -> None:
    memory.reserve(layer)
    memory.rows(layer).fill_(layer + 1)
    memory.mark_filled(layer)


def test_rows_of_all_layers_are_apart_and_aligned() -> None:
    memory = BankMemory.create(identity_of())
    for layer in range(4):
        fill(memory, layer)
    for layer, this in enumerate(memory.identity.layers):
        rows = memory.rows(layer)
        assert rows.shape == (this.num_experts, this.layout.row_bytes)
        assert rows.data_ptr() % PAGE_BYTES == 0
        assert rows.stride(0) % ALIGNMENT_BYTES == 0
        assert bool(rows.eq(layer + 1).all())
    assert memory.num_filled == 4
    assert memory.fd is not None
    assert os.fstat(memory.fd).st_size == memory.identity.num_bytes
    assert os.fstat(memory.fd).st_blocks * 512 == memory.identity.num_bytes


def test_a_second_mapping_sees_what_was_filled_and_what_was_not() -> None:
    memory = BankMemory.create(identity_of())
    fill(memory, 2)
    assert memory.fd is not None
    again = BankMemory.attach(os.dup(memory.fd), identity_of())
    memory.close()
    assert again is not None
    assert [again.is_filled(layer) for layer in range(4)] == [False, False, True, False]
    assert bool(again.rows(2).eq(3).all())
    fill(again, 0)
    assert bool(memory.rows(0).eq(1).all()), "both are the same memory"


@pytest.mark.parametrize(
    "other",
    [
        identity_of("b"),
        identity_of(num_layers=2),
        replace(identity_of(), layers=identity_of().layers[::-1]),
        replace(identity_of(), layers=(BankLayer("x", 4, LAYOUT), *identity_of().layers[1:])),
        replace(
            identity_of(),
            layers=(BankLayer("layers.0.experts", 4, WIDE), *identity_of().layers[1:]),
        ),
    ],
    ids=["checkpoint", "fewer layers", "other order", "other name", "other layout"],
)
def test_memory_of_another_identity_is_refused(other: BankIdentity) -> None:
    memory = BankMemory.create(identity_of())
    assert memory.fd is not None
    assert BankMemory.attach(memory.fd, other) is None
    assert other.digest != memory.identity.digest


def test_what_is_no_bank_is_refused(tmp_path: os.PathLike[str]) -> None:
    size = identity_of().num_bytes
    read, write = os.pipe()
    zeros = os.memfd_create("zeros")
    os.ftruncate(zeros, size)
    for fd in (read, zeros, os.open(tmp_path, os.O_RDONLY), os.open("/dev/null", os.O_RDWR)):
        assert BankMemory.attach(fd, identity_of()) is None
        os.close(fd)
    os.close(write)


def test_nobody_can_cut_the_memory_off_under_a_mapping() -> None:
    memory = BankMemory.create(identity_of())
    assert memory.fd is not None
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 4096)


def test_threads_fill_layers_at_the_same_time() -> None:
    identity = identity_of(num_layers=15)
    memory = BankMemory.create(identity)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda layer: fill(memory, layer), range(16)))
    for layer in range(16):
        assert bool(memory.rows(layer).eq(layer + 1).all())
    assert memory.num_filled == 16


def test_rows_outlive_their_memory_object() -> None:
    memory = BankMemory.create(identity_of())
    fill(memory, 1)
    rows = memory.rows(1)
    memory.close()
    del memory
    assert bool(rows.eq(2).all())


def test_a_row_bank_in_shared_memory_writes_there() -> None:
    memory = BankMemory.create(identity_of())
    bank = RowBank(LAYOUT, 4, memory.rows(1))
    bank.put(2, "down_proj", torch.full((24, 10), 2.5))
    offset = LAYOUT.tensor("down_proj").offset_bytes
    stored = memory.rows(1)[2, offset : offset + 960].view(torch.float32)
    assert bool(stored.eq(2.5).all())
    assert not bank.is_pinned


def test_more_memory_than_there_is_is_an_error_and_no_crash() -> None:
    """In a process of its own, whose files may have a megabyte: what a full system answers."""
    program = (
        "import resource, torch; from tests.experts.test_shared import *\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({1 << 20}, {1 << 20}))\n"
        "layer = BankLayer('x', 4096, LAYOUT)\n"
        "try: BankMemory.create(BankIdentity('a', (layer,)))\n"
        "except EngineError as error: print(error)\n"
    )
    done = run_python(program)
    assert done.returncode == 0, done.stderr
    assert "gave 0.00 of 0.01 GiB for the expert banks (EFBIG" in done.stdout


def test_a_shortage_while_reserving_says_how_far_it_went(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = BankMemory.create(identity_of())

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EngineError, match=r"ENOSPC: No space left.*raise the limit"):
        memory.reserve(1)


def test_without_memfds_the_memory_is_the_worker_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    memory = BankMemory.create(identity_of())
    assert memory.fd is None
    fill(memory, 3)
    assert bool(memory.rows(3).eq(4).all())
    assert memory.num_filled == 1


def test_creating_takes_no_memory_yet() -> None:
    big = BankIdentity("a", tuple(BankLayer(str(i), 4096, LAYOUT) for i in range(64)))
    assert big.num_bytes > 512 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = BankMemory.create(big)
    assert memory.fd is not None
    assert os.fstat(memory.fd).st_blocks * 512 < 1 << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
