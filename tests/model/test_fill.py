"""Reading in threads, straight into rows where that is the same, and going on where one stopped."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from freetoken.errors import ConfigError, EngineError
from freetoken.experts.pinning import Pinner
from freetoken.experts.shared import BankMemory
from freetoken.model import fill, filler
from freetoken.model.assemble import Weights
from freetoken.model.banks import banks_in, check_host_memory, identify_banks, open_banks
from freetoken.model.build import build_meta_model
from freetoken.model.checkpoint import list_tensors, read_config
from freetoken.model.conversion import plan_loading
from freetoken.model.fill import fill_weights
from freetoken.model.load import give_filled, load_model
from freetoken.model.placement import Placement
from freetoken.model.served import ServedModel
from tests.model import tiny
from tests.processes import run_python

DIRECT = ("qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "granitemoe", "ernie4_5_moe")
"""Families that store experts one by one or stacked, with and without bias, transposed or not."""


def checkpoint(path: Path, family: str = "qwen3_moe", dtype: torch.dtype = torch.float32) -> Path:
    return tiny.save(tiny.make_model(tiny.make_config(family), dtype), path)


class Load:
    """A load of banks that tests can stop, watch and repeat."""

    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.path = path
        self.dtype = dtype
        self.reports: list[tuple[str, int, int]] = []
        model = build_meta_model(read_config(path), dtype)
        self.identity = identify_banks(path, model, "cpu")

    def run(self, memory: BankMemory, stop_at: float = 2.0) -> int:
        """Bytes read; stops with KeyboardInterrupt after this share of them."""

        def progress(what: str, done: int, total: int) -> None:
            self.reports.append((what, done, total))
            if done > stop_at * total:
                raise KeyboardInterrupt

        model = build_meta_model(read_config(self.path), self.dtype)
        plan = plan_loading(model, list_tensors(self.path))
        weights = Weights(model, "slots", "cpu", banks_in(memory))
        return fill_weights(plan, model, weights, memory, progress)

    def fill(self) -> BankMemory:
        memory = BankMemory.create(self.identity)
        self.run(memory)
        return memory


def contents(memory: BankMemory) -> list[torch.Tensor]:
    return [memory.rows(layer).clone() for layer in range(len(memory.identity.layers))]


def assert_equal(memory: BankMemory, other: BankMemory) -> None:
    assert memory.num_filled == len(memory.identity.layers)
    for layer, rows in enumerate(contents(other)):
        assert torch.equal(memory.rows(layer), rows), layer


@pytest.fixture
def no_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filler, "find_placement", lambda *args, **options: None)


# ---- straight into rows


@pytest.mark.parametrize(
    "family", [name for name in tiny.FAMILIES if "moe" in name or name in DIRECT]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_read_from_the_file_are_those_of_the_converter(
    tmp_path: Path, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint(tmp_path, family)
    load = Load(path, dtype)
    straight = load.fill()
    monkeypatch.setattr(filler, "find_placement", lambda *args, **options: None)
    assert_equal(straight, load.fill())


@pytest.mark.parametrize("family", DIRECT)
def test_most_rows_go_straight_in_where_types_agree(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted = Counter[str]()
    convert = filler.convert

    def count(task, tensors, model):  # type: ignore[no-untyped-def]
        converted[task.target.rpartition(".")[2]] += task.bank is not None
        return convert(task, tensors, model)

    monkeypatch.setattr(filler, "convert", count)
    load = Load(checkpoint(tmp_path, family, torch.bfloat16), torch.bfloat16)
    memory = load.fill()
    num_rows = sum(layer.num_experts for layer in memory.identity.layers)
    parts = {tensor.name for tensor in memory.identity.layers[0].layout.tensors}
    transposed = {"gate_up_proj", "down_proj"} if family == "gpt_oss" else set()
    for part in parts:
        expected = num_rows if part in transposed else 1  # the first, to compare
        assert converted[part] == expected, (part, converted)


def test_a_placement_that_was_wrong_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_placement: None
) -> None:
    load = Load(checkpoint(tmp_path))
    right = load.fill()
    wrong = iter(range(100))

    def up_first(task, *args, **options):  # type: ignore[no-untyped-def]
        next(wrong)
        return Placement(tuple(reversed(range(len(task.sources)))))

    monkeypatch.setattr(filler, "find_placement", up_first)
    assert_equal(load.fill(), right)
    assert next(wrong) >= 2, "it was tried"


# ---- threads


def test_every_piece_is_read_once_by_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int | None, int]] = []
    original = filler.Filler.fill

    def note(self, task, experts):  # type: ignore[no-untyped-def]
        seen.append((task.target, task.expert, threading.get_ident()))
        original(self, task, experts)

    monkeypatch.setattr(filler.Filler, "fill", note)
    before = torch.get_num_threads()
    load = Load(checkpoint(tmp_path))
    load.fill()
    assert len({thread for *_, thread in seen}) > 1
    assert max(Counter((target, expert) for target, expert, _ in seen).values()) == 1
    assert torch.get_num_threads() == before
    done = [done for _, done, _ in load.reports]
    assert done == sorted(done)
    assert (
        done[-1] == load.reports[-1][2] == sum(t.num_bytes for t in list_tensors(tmp_path).values())
    )


def test_what_is_in_flight_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill, "MAX_FLIGHT_BYTES", 10)
    lock, flying, most = threading.Lock(), 0, 0
    sizes = [4, 4, 4, 25, 1, 1, 9, 9, 10, 3, 3, 3, 3] * 5

    def work(size: int) -> None:
        nonlocal flying, most
        with lock:
            flying += size
            most = max(most, flying if size < 25 else flying - 15)
        with lock:
            flying -= size

    with fill._threads() as threads:
        landed = list(fill._run(threads, work, ((size, size) for size in sizes)))
    assert sorted(landed) == sorted(sizes)
    assert most <= 10


def test_the_first_error_ends_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint(tmp_path)
    load = Load(path)
    memory = BankMemory.create(load.identity)
    tensors = list_tensors(path)
    monkeypatch.setattr("tests.model.test_fill.list_tensors", lambda path: tensors)
    shard = sorted(path.glob("*.safetensors"))[1]
    os.truncate(shard, shard.stat().st_size // 2)  # after its header was read
    with pytest.raises(ConfigError, match=rf"{shard.name} ends within tensor"):
        load.run(memory)
    assert memory.num_filled < len(load.identity.layers)


def test_a_shortage_of_memory_ends_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Load(checkpoint(tmp_path))
    memory = BankMemory.create(load.identity)
    reserve = BankMemory.reserve

    def run_short(self: BankMemory, layer: int) -> None:
        if layer == 1:
            raise EngineError("the system gave 1 of 2 GiB")
        reserve(self, layer)

    monkeypatch.setattr(BankMemory, "reserve", run_short)
    with pytest.raises(EngineError, match="gave 1 of 2 GiB"):
        load.run(memory)
    assert not memory.is_filled(1)


# ---- going on


@pytest.mark.parametrize("share", [0.0, 0.4, 0.75, 0.95])
def test_a_load_that_was_stopped_goes_on_with_the_layers_that_are_left(
    tmp_path: Path, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fill, "MAX_FLYING", 1)  # one after the other, so that the share says where
    load = Load(checkpoint(tmp_path))
    whole = load.fill()
    memory = BankMemory.create(load.identity)
    with pytest.raises(KeyboardInterrupt):
        load.run(memory, stop_at=share)
    assert memory.fd is not None
    found = BankMemory.attach(os.dup(memory.fd), load.identity)
    assert found is not None
    filled = [layer for layer in range(3) if found.is_filled(layer)]
    assert len(filled) < 3 or share > 0.9
    assert filled or share < 0.7
    for layer in filled:
        assert torch.equal(found.rows(layer), whole.rows(layer))
    expert_bytes = sum(load.identity.layers[layer].num_bytes for layer in filled)
    total = load.reports[-1][2]
    assert load.run(found) == total - expert_bytes
    assert_equal(found, whole)


def test_a_load_killed_by_the_system_goes_on_in_the_next_process(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    load = Load(path)
    memory = BankMemory.create(load.identity)
    assert memory.fd is not None
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.model.test_fill import *\n"
        "fill.MAX_FLYING = 1\n"
        f"load = Load(Path({str(path)!r}))\n"
        f"memory = BankMemory.attach({memory.fd}, load.identity)\n"
        "try: load.run(memory, stop_at=0.75)\n"
        "except KeyboardInterrupt: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    os.set_inheritable(memory.fd, True)
    done = run_python(program, timeout_s=120, pass_fds=[memory.fd])
    assert done.returncode == -signal.SIGKILL, done.stderr
    num_filled = memory.num_filled
    assert 0 < num_filled < 3
    whole = load.fill()
    assert load.run(memory) < load.reports[0][2]
    assert_equal(memory, whole)


def test_a_changed_checkpoint_has_another_identity(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    first = Load(path).identity
    assert Load(path).identity == first
    assert Load(path, torch.bfloat16).identity.digest != first.digest
    shard = next(path.glob("*.safetensors"))
    tensors = load_file(shard)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, shard)
    changed = Load(path).identity
    assert changed.digest != first.digest
    config = path / "config.json"
    config.write_text(config.read_text() + "\n")
    assert Load(path).identity.digest != changed.digest


# ---- pinning


def load_pinned(path: Path, pinner: Pinner, **options: Any) -> ServedModel:
    def progress(what: str, done: int, total: int) -> None:
        pass

    return load_model(
        path,
        dtype="auto",
        device="cpu",
        experts="slots",
        num_slots=4,
        progress=progress,
        pinner=pinner,
        **options,
    )


def released(rows: torch.Tensor) -> None:
    """Undoes nothing."""


def test_layers_are_pinned_as_soon_as_they_are_filled(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    filled: list[bool] = []
    pinner = Pinner(lambda rows: filled.append(bool(rows.any(1).all())), released)
    model = load_pinned(path, pinner)
    assert filled == [True] * len(filled)
    banks = model._slots.pool.banks
    assert len(filled) == len(banks) > 1
    assert all(bank.is_pinned for bank in banks)


def test_layers_that_are_there_are_pinned_before_and_once(tmp_path: Path) -> None:
    load = Load(checkpoint(tmp_path))
    memory = load.fill()
    rows: list[int] = []
    pinner = Pinner(lambda tensor: rows.append(tensor.data_ptr()), released)
    give_filled(pinner, memory)
    banks = load_pinned(load.path, pinner, found=memory)._slots.pool.banks
    assert rows == [bank.rows.data_ptr() for bank in banks]
    assert all(bank.is_pinned for bank in banks)


def test_banks_that_were_pinned_for_other_files_are_no_use(tmp_path: Path) -> None:
    load = Load(checkpoint(tmp_path))
    memory = load.fill()
    with Pinner(released, released) as pinner:
        give_filled(pinner, memory)
        os.utime(next(load.path.glob("*.safetensors")))
        with pytest.raises(EngineError, match="have changed while"):
            load_pinned(load.path, pinner, found=memory)


# ---- memory


def test_banks_that_do_not_fit_are_refused_before_anything_is_taken(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    need = Load(path).identity.num_bytes
    with pytest.raises(
        ConfigError, match=r"need .* GiB of host memory .* are free .*raise the lim"
    ):
        load_model(
            path,
            dtype="auto",
            device="cpu",
            experts="slots",
            num_slots=4,
            progress=lambda what, done, total: pytest.fail("nothing may be read"),
            host_free_bytes=2 * need - 1,
        )
    check_host_memory(need, 2 * need)


def test_banks_that_are_there_need_no_more_memory(tmp_path: Path) -> None:
    load = Load(checkpoint(tmp_path))
    memory = load.fill()
    assert open_banks(load.identity, memory, None, 0) is memory
    with pytest.raises(ConfigError):
        open_banks(load.identity, BankMemory.create(load.identity), None, 0)
    other = load.identity.__class__("another", load.identity.layers)
    assert open_banks(other, memory, None, None) is not memory


PEAK = """
import sys
from pathlib import Path
from freetoken.model.load import give_filled, load_model

def peak_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

def load(path):
    return load_model(Path(path), dtype="auto", device="cpu", experts="slots", num_slots=1,
                      progress=lambda *args: None)

small, large = sys.argv[1:]
load(small)
before = peak_kib()
load(large)
print((peak_kib() - before) << 10)
"""


def test_a_load_takes_little_more_than_banks_and_dense_weights(tmp_path: Path) -> None:
    """Not the 96 MiB that the checkpoint would take beside them, and half as much for a layer."""
    from tools.make_moe import MoeShape, make_checkpoint

    small = make_checkpoint(tmp_path / "small", MoeShape())
    shape = MoeShape(layers=4, experts=16, hidden=512, expert_hidden=512, vocab=512)
    large = make_checkpoint(tmp_path / "large", shape)
    banks = Load(large, torch.bfloat16).identity.num_bytes
    assert banks > 96 << 20
    done = run_python(PEAK, str(small), str(large), timeout_s=120)
    assert done.returncode == 0, done.stderr
    # The scratch rows are a layer's; the rest is dense weights and a buffer per thread.
    assert int(done.stdout) < banks * 1.25 + (24 << 20), f"{int(done.stdout) >> 20} MiB"
