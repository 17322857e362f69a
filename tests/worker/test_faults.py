"""What is short of memory, what shrinks, and what the last line of a process says."""

from __future__ import annotations

import pytest
import torch

from freetoken.worker.faults import (
    MIN_PIECE_TOKENS,
    PieceSize,
    StepError,
    describe,
    is_out_of_memory,
    memory_message,
)

ILLEGAL = (
    "CUDA error: an illegal memory access was encountered\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace "
    "below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("ft_copy_rows: cudaErrorMemoryAllocation"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_memory_that_is_short_is_recognised(error):
    assert is_out_of_memory(error)
    assert memory_message(error) == str(error)


@pytest.mark.parametrize("error", [RuntimeError(ILLEGAL), ValueError("out of memory")])
def test_other_errors_are_raised_again(error):
    with pytest.raises(type(error)):
        memory_message(error)


def test_a_fault_of_the_gpu_is_one_line():
    line = describe(RuntimeError(ILLEGAL))
    assert line.startswith("CUDA error: an illegal memory access was encountered;")
    assert "CUDA_LAUNCH_BLOCKING" not in line
    assert describe(ValueError("two\n  lines")) == "ValueError: two lines"


def test_pieces_are_halved_down_to_the_smallest():
    piece = PieceSize(1000)
    piece.shrink(100, "no memory")
    assert piece.num_tokens == 50, "half of what was tried"
    piece.shrink(400, "no memory")
    assert piece.num_tokens == 25
    piece.shrink(400, "no memory")
    assert piece.num_tokens == MIN_PIECE_TOKENS
    with pytest.raises(StepError, match="out of memory with 16 tokens at a time: no memory"):
        piece.shrink(400, "no memory")
