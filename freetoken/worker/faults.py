"""What fails one step and not the process."""

from __future__ import annotations

import torch

from freetoken.errors import FreeTokenError


class StepError(FreeTokenError):
    """The rows of this step fail; the worker goes on. Crosses the wire as WorkerFailed(step)."""


def is_out_of_memory(error: BaseException) -> bool:
    """True for an allocation that failed on the host or the device, in torch or in Python."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # torch's CPU allocator raises a plain RuntimeError with this text (c10/core/CPUAllocator.cpp).
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
