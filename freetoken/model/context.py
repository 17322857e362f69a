"""What a forward needs to know beyond token ids: where each token sits and where k/v live.

The worker fills a StepContext for each forward; the attention function reads it. Tokens of a step
are one flat batch `[1, T]`: first the extend rows, each a contiguous segment, then the decode rows,
one token each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `[start, start + length)` of the flat batch, all of one row, at consecutive positions.

    The first of them has position `cached_len`; after the step the row holds
    `cached_len + length` tokens of k/v.
    """

    row_id: int
    start: int
    length: int
    cached_len: int


@dataclass(frozen=True, slots=True)
class KvPools:
    """Paged k/v of all layers. `k[i]: [P + 1, S, G, Dk]`, `v[i]: [P + 1, S, G, Dv]`; the last page
    is the sentinel that padding writes to. Layer i is the i-th attention layer (`layer_idx`)."""

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    page_size: int


@dataclass(frozen=True, slots=True)
class StepContext:
    """One forward.

    positions: [T] int64 · rows: [T] int64, the row id of each token ·
    page_table: [R, max_pages] int32, pages of a row in order of position · num_tokens: [1] int32 on
    the device, tokens from there on are padding: they write to the sentinel page, route to no
    expert, and their results mean nothing; None when there are none. On a GPU an on-demand step
    reads tensors only, never `segments`: those may be empty there.
    """

    positions: torch.Tensor
    rows: torch.Tensor
    page_table: torch.Tensor
    segments: tuple[Segment, ...]
    pools: KvPools
    num_tokens: torch.Tensor | None = None
