"""The C library's heap, which keeps what was freed. Called while and after weights are loaded."""

from __future__ import annotations

import ctypes
from contextlib import suppress


def trim_heap() -> None:
    """Give freed memory back to the system, where the C library can.

    Converted tensors that lived between the banks leave holes: 0.6 of 1.9 GB after loading, and
    375 of 2018 MiB once the demo model was assembled (glibc 2.36, 2026-12-01).
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
