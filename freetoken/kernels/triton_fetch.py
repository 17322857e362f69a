"""Gathers expert rows from pinned host memory over the link, where cuda/fetch.cu is not available.

A fixed number of programs shares the pieces of all rows that are to be fetched, whose number only
the device knows; with nothing to fetch each leaves after one load.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# On an H200 gathers want about 0.1 MB in flight, and each program has all its loads of a piece out.
PROGRAMS = 64
PIECE_WORDS = 4096
NUM_WARPS = 8


def fetch(
    bank_rows: torch.Tensor,
    pool_rows: torch.Tensor,
    fetch_experts: torch.Tensor,
    fetch_rows: torch.Tensor,
    num_fetch: torch.Tensor,
    *,
    programs: int = PROGRAMS,
    piece_words: int = PIECE_WORDS,
    num_warps: int = NUM_WARPS,
) -> None:
    """Copy bank row fetch_experts[i] to pool row fetch_rows[i] for i < num_fetch.

    bank_rows: [E, row_bytes] uint8, pinned · pool_rows: [·, row_bytes] uint8 cuda · row_bytes: a
    multiple of 8 · piece_words: a power of two, words of 8 bytes that a program copies at a time.
    """
    bank, pool = bank_rows.view(torch.int64), pool_rows.view(torch.int64)
    _fetch[(programs,)](
        bank,
        pool,
        fetch_experts,
        fetch_rows,
        num_fetch,
        bank.shape[1],
        PIECE=piece_words,
        num_warps=num_warps,
    )


@triton.jit
def _fetch(bank, pool, experts, rows, num_rows, row_words, PIECE: tl.constexpr):
    pieces = tl.cdiv(row_words, PIECE)
    num_items = tl.load(num_rows) * pieces
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        i = item // pieces
        source = tl.load(experts + i).to(tl.int64) * row_words
        target = tl.load(rows + i).to(tl.int64) * row_words
        word = (item % pieces) * PIECE + tl.arange(0, PIECE)
        held = tl.load(bank + source + word, mask=word < row_words)
        tl.store(pool + target + word, held, mask=word < row_words)
