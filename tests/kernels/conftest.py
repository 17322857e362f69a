"""Where kernels are tested: on a GPU if there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`kernel_dtype`: what kernels are tested in. bf16 arithmetic is wrong in the interpreter, and
    it is slow: fp16, which shows where they round, is enough to begin with."""
    if "kernel_dtype" in metafunc.fixturenames:
        dtypes = [torch.float16, pytest.param(torch.float32, marks=pytest.mark.slow)]
        if torch.cuda.is_available():
            dtypes = [torch.float32, torch.float16, torch.bfloat16]
        metafunc.parametrize("kernel_dtype", dtypes, ids=str)
