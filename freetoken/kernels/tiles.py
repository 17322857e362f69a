"""Where a long row is cut: attention is fastest for queries from one such place to another."""

from __future__ import annotations

from collections.abc import Sequence

TILE_SIZES = (8192, 4096)
"""Tokens, counted from a row's first one on; the largest first, each a multiple of the next."""


def chunk_tile(chunk_tokens: int, sizes: Sequence[int] = TILE_SIZES) -> int:
    """The tile at whose multiples chunks of at most `chunk_tokens` tokens end: the largest that
    they can hold, else 1."""
    return next((size for size in sizes if size <= chunk_tokens), 1)
