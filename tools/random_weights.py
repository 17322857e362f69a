"""Random weights written straight into safetensors files, as fast as the disk takes them.

All values of a standard deviation come from one block of normal numbers: a tensor is a row of
pieces of it, each from a place of its own that depends on the tensor's name and the seed. So a
checkpoint of 20 GB takes seconds, is not degenerate (no two rows of a matrix are equal), and the
same arguments give the same bytes. Knows nothing of models.
"""

from __future__ import annotations

import json
import os
import random
import struct
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

MAX_BLOCK_SIZE = 1 << 24  # numbers; 32 MiB in bf16, which stays in a server's cache
MARGIN = 4099  # numbers that a block has beyond that: no period divides the rows of a matrix
PIECE_SIZE = 1 << 21  # numbers at most that are written from one place of the block
MAX_THREADS = 16
GAIN = 1.6  # of a matrix: outputs over inputs
# Attention's outputs are means over tokens. Unless they are small beside embeddings, each layer
# adds more of what all tokens have in common, until all are routed to the same experts.
EMBEDDING_STD = 1.0
ATTENTION_GAIN = 0.2
TYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
ReportBytes = Callable[[int], None]


class RandomWeights:
    """Values of a size that keeps activations of order one.

    `num_values`: of the whole checkpoint, so that a small one needs a small block only.
    """

    def __init__(self, seed: int, num_values: int) -> None:
        self._seed = seed
        generator = torch.Generator().manual_seed(seed)
        size = min(num_values, MAX_BLOCK_SIZE) + MARGIN
        self._block = torch.randn(size, generator=generator)
        self._scaled: dict[tuple[float, torch.dtype], memoryview] = {}

    def write(self, file: Path, tensors: Mapping[str, torch.Tensor], report: ReportBytes) -> None:
        """Write a safetensors file with random values for the meta `tensors`.

        `report` gets the bytes of each piece, from several threads.
        """
        # Larger numbers first, as safetensors does, so that all are aligned.
        names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets, end = {}, 0
        for name in names:
            like = tensors[name]
            offsets[name], end = end, end + like.numel() * like.itemsize
            header[name] = {
                "dtype": TYPE_NAMES[like.dtype],
                "shape": list(like.shape),
                "data_offsets": [offsets[name], end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        start = 8 + len(text)
        pieces = [
            (start + offsets[name] + at, piece)
            for name in names
            for at, piece in self._pieces(name, tensors[name])
        ]
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

        def put(item: tuple[int, memoryview]) -> None:
            _write_all(descriptor, *item)
            report(len(item[1]))

        try:
            os.truncate(descriptor, start + end)
            _write_all(descriptor, 0, memoryview(struct.pack("<Q", len(text)) + text))
            threads = min(MAX_THREADS, os.cpu_count() or 1)
            with ThreadPoolExecutor(threads) as pool:
                for _ in pool.map(put, pieces):
                    pass
        finally:
            os.close(descriptor)

    def _pieces(self, name: str, like: torch.Tensor) -> list[tuple[int, memoryview]]:
        """(offset in bytes, contents) of the tensor's parts."""
        seed = zlib.crc32(name.encode()) ^ self._seed
        if like.dim() <= 1:
            return [(0, _bytes_of(_vector(name, like, seed)))]
        std = _std(name, like)
        block = self._scaled.get((std, like.dtype))
        if block is None:
            block = _bytes_of((self._block * std).to(like.dtype))
            self._scaled[std, like.dtype] = block
        places = random.Random(seed)
        pieces = []
        for at in range(0, like.numel(), PIECE_SIZE):
            size = min(PIECE_SIZE, like.numel() - at)
            place = places.randrange(len(self._block) - size)
            piece = block[place * like.itemsize : (place + size) * like.itemsize]
            pieces.append((at * like.itemsize, piece))
        return pieces


def _std(name: str, like: torch.Tensor) -> float:
    if "embed_tokens" in name:
        return EMBEDDING_STD
    gain = ATTENTION_GAIN if "o_proj" in name else GAIN
    return float(gain * like.shape[-1] ** -0.5)


def _vector(name: str, like: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.empty(like.shape, dtype=like.dtype)
    if "norm" in name and name.endswith("weight"):
        return tensor.uniform_(0.8, 1.2, generator=generator)
    return tensor.uniform_(-0.1, 0.1, generator=generator)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy()).cast("B")


def _write_all(descriptor: int, offset: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        offset, data = offset + written, data[written:]
