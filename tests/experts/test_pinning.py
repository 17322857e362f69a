"""What is pinned when the system lets us pin everything, something, or nothing."""

from __future__ import annotations

import gc
import logging
import mmap
import threading
import weakref

import pytest
import torch

from freetoken.experts.bank import RowBank
from freetoken.experts.layout import ExpertLayout
from freetoken.experts.pinning import Pinner, Release

LAYOUT = ExpertLayout.plan({"up_proj": (8, 16), "down_proj": (16, 8)}, torch.float32)


class Register:
    """Pins up to `limit` tensors."""

    def __init__(self, limit: int, error: Exception | None = None) -> None:
        self.pinned: list[int] = []
        self.calls = 0
        self._limit = limit
        self._error = error or RuntimeError("out of memory")

    def __call__(self, tensor: torch.Tensor) -> None:
        self.calls += 1
        if len(self.pinned) == self._limit:
            raise self._error
        self.pinned.append(tensor.data_ptr())


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("freetoken"), "propagate", True)


def released(tensor: torch.Tensor) -> None:
    """A Release where nothing is to be undone."""


def make_banks() -> list[RowBank]:
    return [RowBank(LAYOUT, 4) for _ in range(3)]


def pin(
    banks: list[RowBank],
    register: Register,
    order: tuple[int, ...] = (0, 1, 2),
    release: Release = released,
) -> int:
    with Pinner(register, release) as pinner:
        for layer in order[: len(banks)]:
            pinner.give(layer, banks[layer].rows)
        return pinner.finish(banks)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_every_bank_is_pinned_where_it_lies(order: tuple[int, ...]) -> None:
    banks = make_banks()
    register = Register(3)
    assert pin(banks, register, order) == 3
    assert register.pinned == [banks[layer].rows.data_ptr() for layer in order]
    assert all(bank.is_pinned for bank in banks)


def test_a_bank_is_pinned_once_and_while_others_are_read() -> None:
    banks = make_banks()
    register = Register(3)
    with Pinner(register, released) as pinner:
        for _ in range(2):
            pinner.give(1, banks[1].rows)
        while not register.pinned:
            threading.Event().wait(0.001)
        assert not banks[1].is_pinned, "not yet told"
        for layer in (0, 1, 2):
            pinner.give(layer, banks[layer].rows)
        assert pinner.finish(banks) == 3
    assert register.calls == 3


def test_what_was_not_come_to_is_forgotten_when_the_load_fails() -> None:
    banks = make_banks()
    begun, go_on = threading.Event(), threading.Event()
    calls = []

    def register(tensor: torch.Tensor) -> None:
        calls.append(tensor)
        begun.set()
        assert go_on.wait(10)

    def load() -> None:
        with Pinner(register, released) as pinner:
            for layer, bank in enumerate(banks):
                pinner.give(layer, bank.rows)
            assert begun.wait(10)
            threading.Timer(0.05, go_on.set).start()
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        load()
    assert len(calls) == 1


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), OSError(12, "ENOMEM")])
@pytest.mark.parametrize("limit", [0, 2])
def test_the_first_failure_is_the_last_try_and_is_told(
    caplog: pytest.LogCaptureFixture, limit: int, error: Exception
) -> None:
    banks = make_banks()
    register = Register(limit, error)
    assert pin(banks, register) == limit
    assert register.calls == limit + 1
    assert [bank.is_pinned for bank in banks] == [layer < limit for layer in range(3)]
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    told = record.getMessage()
    assert f"({limit} of 3 layers)" in told
    assert str(error) in told
    assert "ulimit -l" in told
    assert "staging buffer" in told


def test_a_model_without_experts_has_nothing_to_pin() -> None:
    assert pin([], Register(0)) == 0


def test_a_bank_is_released_before_its_memory_is_unmapped() -> None:
    area = mmap.mmap(-1, LAYOUT.row_bytes * 4)
    rows = torch.frombuffer(area, dtype=torch.uint8).view(4, LAYOUT.row_bytes)
    bank = RowBank(LAYOUT, 4, rows)
    mapped = weakref.ref(area)
    del area, rows
    register = Register(1)
    released: list[int] = []

    def release(tensor: torch.Tensor) -> None:
        assert mapped() is not None
        released.append(tensor.data_ptr())

    assert pin([bank], register, release=release) == 1
    assert released == []
    del bank
    gc.collect()
    assert released == register.pinned
    assert mapped() is None


def test_a_bank_that_cannot_be_released_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def release(tensor: torch.Tensor) -> None:
        raise RuntimeError("the device is lost")

    banks = make_banks()
    pin(banks, Register(3), release=release)
    del banks
    gc.collect()
    assert caplog.text.count("the device is lost") == 3
