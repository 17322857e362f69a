"""Triton reads this when it is first imported: without a GPU its kernels run in the interpreter."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
