"""Pins banks, so that a GPU reads them where they are and copies run at the link's speed.

Layer by layer: where the system lets us pin only so much, the layers after that stay unpinned, are
said so (`RowBank.is_pinned`), and are copied through a staging buffer by whoever needs them. What
is pinned is released before it is unmapped: otherwise the driver would take whatever lies at its
addresses later for the pages that it has locked.
"""

from __future__ import annotations

import resource
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from freetoken import log
from freetoken.experts.bank import RowBank
from freetoken.kernels import pinned

Register = Callable[[torch.Tensor], None]
"""Pin and map the memory of a contiguous cpu tensor; raises RuntimeError or OSError."""
Release = Callable[[torch.Tensor], None]
"""Undo a Register; raises as it does."""
GIB = 1 << 30

_log = log.get(__name__)


class Pinner:
    """Pins layers in a thread of its own, while whoever gives them reads others or checks the
    model: it takes about 0.1 s/GiB in the system, and nothing of Python.

    As a context manager it forgets at the end what it has not come to.
    """

    def __init__(
        self, register: Register = pinned.register, release: Release = pinned.unregister
    ) -> None:
        self._register = register
        self._release = release
        self._executor = ThreadPoolExecutor(1, "pin")
        self._given: dict[int, Future[bool]] = {}
        self._error: Exception | None = None

    def __enter__(self) -> Pinner:
        return self

    def __exit__(self, *exc: object) -> None:
        self._executor.shutdown(cancel_futures=True)

    def give(self, layer: int, rows: torch.Tensor) -> None:
        """Pin the rows of a layer, which begin on a page of their own, after those given before;
        once, if it is given again."""
        if layer not in self._given and rows.numel():
            self._given[layer] = self._executor.submit(self._pin, rows)

    def finish(self, banks: Sequence[RowBank]) -> int:
        """Wait, and tell `banks`, those of all layers in order; how many are pinned.

        Each stays pinned as long as the bank lives.
        """
        given = self._given.items()
        pinned_banks = [banks[layer] for layer, future in given if future.result()]
        for bank in pinned_banks:
            bank.is_pinned = True
            # It holds the rows, so that they are unmapped after this. A process that ends needs
            # none.
            weakref.finalize(bank, _release, self._release, bank.rows).atexit = False
        if self._error is not None:
            _warn(banks, pinned_banks, self._error)
        elif banks:
            _log.info(log.event("bank.pinned", layers=len(banks), mib=_num_bytes(banks) >> 20))
        return len(pinned_banks)

    def _pin(self, rows: torch.Tensor) -> bool:
        """After the first failure nothing is tried."""
        if self._error is None:
            try:
                self._register(rows)
                return True
            except (RuntimeError, OSError) as error:
                self._error = error
        return False


def _release(release: Release, rows: torch.Tensor) -> None:
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what reads the rows may be queued only
        release(rows)
    except (RuntimeError, OSError) as error:
        # A device that is lost has released everything.
        _log.warning(log.event("bank.not_released", error=" ".join(str(error).split())))


def _num_bytes(banks: Sequence[RowBank]) -> int:
    return sum(bank.rows.nbytes for bank in banks)


def _warn(banks: Sequence[RowBank], pinned_banks: Sequence[RowBank], error: Exception) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    _log.warning(
        "pinned %.2f of %.2f GiB of expert banks (%d of %d layers), then: %s; the limit of locked "
        "memory (ulimit -l) is %s. The other layers are served through a staging buffer, several "
        "times slower when their experts are not resident; raise the limit (LimitMEMLOCK=infinity, "
        "--ulimit memlock=-1)",
        _num_bytes(pinned_banks) / GIB,
        _num_bytes(banks) / GIB,
        len(pinned_banks),
        len(banks),
        " ".join(str(error).split()),
        limit,
    )
