"""From the checked work of a step to the tensors of its forward, whole or in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freetoken.model.context import KvPools, Segment, StepContext
from freetoken.worker.rows import Part, Rows, Work


@dataclass(frozen=True, slots=True)
class Batch:
    """ids: [T] int64 · logits_at: [n] int64 indices of the tokens to sample from."""

    ids: Tensor
    context: StepContext
    logits_at: Tensor


def assemble(work: Work, rows: Rows, pools: KvPools) -> Batch:
    """One flat batch: the extends in order, then the decode rows, each row one segment."""
    device = rows.last_tokens.device
    segments, last_at, start = [], [], 0
    for part in work.extends:
        length = len(part.token_ids)
        segments.append(Segment(part.row_id, start, length, part.cached_len))
        start += length
        if part.is_last:
            last_at.append(start - 1)
    num_extend = start
    decode = zip(work.decode_rows.tolist(), work.decode_positions.tolist(), strict=True)
    for row_id, position in decode:
        segments.append(Segment(row_id, start, 1, position))
        start += 1
    num_decode = start - num_extend
    parts = work.extends
    row_ids = np.concatenate(
        [np.full(len(part.token_ids), part.row_id, np.int64) for part in parts] + [work.decode_rows]
    )
    positions = np.concatenate(
        [np.arange(part.cached_len, part.cached_len + len(part.token_ids)) for part in parts]
        + [work.decode_positions]
    )
    ids = torch.empty(start, dtype=torch.int64, device=device)
    if num_extend:
        ids[:num_extend] = torch.from_numpy(np.concatenate([part.token_ids for part in parts]))
    if num_decode:
        ids[num_extend:] = rows.last_tokens[torch.from_numpy(work.decode_rows).to(device)]
    at = np.concatenate([np.array(last_at, np.int64), np.arange(num_extend, start)])
    context = StepContext(
        positions=torch.from_numpy(positions).to(device),
        rows=torch.from_numpy(row_ids).to(device),
        page_table=rows.pages.device,
        segments=tuple(segments),
        pools=pools,
    )
    return Batch(ids, context, torch.from_numpy(at).to(device))


def split(work: Work, max_tokens: int) -> Iterator[Work]:
    """The same work in pieces of at most `max_tokens`: first the decode rows, whose streams wait,
    then the extends one after another."""
    nobody = np.empty(0, np.int64)
    for first in range(0, len(work.decode_rows), max_tokens):
        piece = slice(first, first + max_tokens)
        yield Work((), work.decode_rows[piece], work.decode_positions[piece])
    for part in work.extends:
        for first in range(0, len(part.token_ids), max_tokens):
            ids = part.token_ids[first : first + max_tokens]
            is_end = first + len(ids) == len(part.token_ids)
            piece_of = Part(part.row_id, part.cached_len + first, ids, part.is_last and is_end)
            yield Work((piece_of,), nobody, nobody)
