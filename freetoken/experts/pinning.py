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


def pin_banks(
    banks: Sequence[RowBank],
    register: Register = pinned.register,
    release: Release = pinned.unregister,
) -> int:
    """Pin bank after bank up to the first that fails; returns how many are pinned.

    The banks' rows begin on a page of their own. Each stays pinned as long as the bank lives.
    """
    for index, bank in enumerate(banks):
        if not bank.rows.numel():
            continue
        try:
            register(bank.rows)
        except (RuntimeError, OSError) as error:
            _warn(banks, index, error)
            return index
        bank.is_pinned = True
        # It holds the rows, so that they are unmapped after this. A process that ends needs none.
        weakref.finalize(bank, _release, release, bank.rows).atexit = False
    _log.info(log.event("bank.pinned", layers=len(banks), mib=_num_bytes(banks) >> 20))
    return len(banks)


def _release(release: Release, rows: torch.Tensor) -> None:
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what reads the rows may be queued only
        release(rows)
    except (RuntimeError, OSError) as error:
        # A device that is lost has released everything.
        _log.warning(log.event("bank.unpinned", error=" ".join(str(error).split())))


def _num_bytes(banks: Sequence[RowBank]) -> int:
    return sum(bank.rows.nbytes for bank in banks)


def _warn(banks: Sequence[RowBank], num_pinned: int, error: Exception) -> None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    _log.warning(
        "pinned %.2f of %.2f GiB of expert banks (%d of %d layers), then: %s; the limit of locked "
        "memory (ulimit -l) is %s. The other layers are served through a staging buffer, several "
        "times slower when their experts are not resident; raise the limit (LimitMEMLOCK=infinity, "
        "--ulimit memlock=-1)",
        _num_bytes(banks[:num_pinned]) / GIB,
        _num_bytes(banks) / GIB,
        num_pinned,
        len(banks),
        " ".join(str(error).split()),
        limit,
    )
