"""What fails one step and not the process, and how steps shrink when memory is short."""

from __future__ import annotations

import torch

from freetoken import log
from freetoken.errors import FreeTokenError

MIN_PIECE_TOKENS = 16
"""A piece this small that still runs out of memory fails its step."""

# Texts of plain RuntimeErrors: torch's CPU allocator (c10/core/CPUAllocator.cpp), the CUDA runtime
# and driver, libraries that want memory of their own, Triton when it loads a kernel, and ours in
# cuda/. The GPU's context survives all of them.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Triton Error [CUDA]: out of memory",
    "cudaErrorMemoryAllocation",
)

_log = log.get(__name__)


class StepError(FreeTokenError):
    """The rows of this step fail; the worker goes on. Crosses the wire as WorkerFailed(step)."""


def is_out_of_memory(error: BaseException) -> bool:
    """True for an allocation that failed on the host or the device, in torch or in Python."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def describe(error: BaseException) -> str:
    """For the last line of a process. What CUDA reports is named without its advice to debuggers:
    a fault in a kernel, after which the device's context is lost and only a new process helps."""
    lines = str(error).split("\n")
    if isinstance(error, RuntimeError) and "CUDA error" in lines[0]:
        return f"{lines[0].strip()}; the GPU's context is lost with it"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def memory_message(error: BaseException) -> str:
    """The text of an error that is_out_of_memory; every other one is raised again."""
    if not is_out_of_memory(error):
        raise error
    return str(error)


def give_back_memory() -> None:
    """What the GPU's allocator holds and nobody uses, in pieces that may be too small for the next
    try. To be called when the error has been dropped: its traceback holds tensors."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class PieceSize:
    """`num_tokens`: how many a forward takes at a time; later steps keep to what fitted."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def shrink(self, num_tokens: int, message: str) -> None:
        """Memory ran out in work of `num_tokens`, which is tried again in smaller pieces after
        this; StepError if they cannot be smaller. See give_back_memory."""
        tried = min(self.num_tokens, num_tokens)
        if tried <= MIN_PIECE_TOKENS:
            raise StepError(f"out of memory with {tried} tokens at a time: {message}")
        self.num_tokens = max(MIN_PIECE_TOKENS, tried // 2)
        give_back_memory()
        _log.warning(
            log.event("step.out_of_memory", tokens=num_tokens, piece=self.num_tokens, error=message)
        )
