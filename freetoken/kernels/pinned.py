"""Pins host memory that exists already: banks in shared memory, which no allocator of torch's made.

Pinned memory is read by kernels where it is, and copied by the copy engine at the link's speed. A
single copy must not cross from one registration to the next.
"""

from __future__ import annotations

import torch

from freetoken.kernels import cuda_library

# cudaHostRegisterPortable | cudaHostRegisterMapped, as in cuda/register.cu.
REGISTER_FLAGS = 1 | 2


def register(tensor: torch.Tensor) -> None:
    """Pin and map the memory of a contiguous cpu tensor, which should begin on a page of its own.

    Raises RuntimeError with CUDA's reason. Takes about 0.1 s/GiB, twice that in a second process
    (H200's host, 2026-12-01).
    """
    assert tensor.is_contiguous(), "only contiguous memory can be pinned"
    library = cuda_library.load()
    if library is not None:
        library.register_host(tensor.data_ptr(), tensor.nbytes)
        return
    cudart = torch.cuda.cudart()
    code = cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, REGISTER_FLAGS)
    _check("cudaHostRegister", code)


def unregister(tensor: torch.Tensor) -> None:
    """Undo `register`, before the memory is unmapped. Raises RuntimeError with CUDA's reason."""
    library = cuda_library.load()
    if library is not None:
        library.unregister_host(tensor.data_ptr())
        return
    _check("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr()))


def _check(name: str, code: object) -> None:
    if int(code) == 0:  # type: ignore[call-overload]
        return
    reason = torch.cuda.cudart().cudaGetErrorString(code)
    _clear_error()
    raise RuntimeError(f"{name}: {reason}")


def _clear_error() -> None:
    """torch's runtime remembers the failure, and would report it at the next kernel launch."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        return
