"""From the checked work of a step to the tensors of its forward, whole or in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freetoken.model.context import KvPools, Segment, StepContext
from freetoken.worker.rows import Part, Rows, Work
from freetoken.worker.transfer import to_device


@dataclass(frozen=True, slots=True)
class Batch:
    """ids: [T] int64 · logits_at: [n] int64 indices of the tokens to sample from."""

    ids: Tensor
    context: StepContext
    logits_at: Tensor


def segments_of(work: Work) -> tuple[Segment, ...]:
    """Where each row's tokens lie in the flat batch: the extends in order, then the decode rows."""
    segments, start = [], 0
    for part in work.extends:
        segments.append(Segment(part.row_id, start, len(part.token_ids), part.cached_len))
        start += len(part.token_ids)
    decode = zip(work.decode_rows.tolist(), work.decode_positions.tolist(), strict=True)
    segments += [
        Segment(row_id, at, 1, position) for at, (row_id, position) in enumerate(decode, start)
    ]
    return tuple(segments)


def assemble(work: Work, rows: Rows, pools: KvPools) -> Batch:
    """One flat batch: the extends in order, then the decode rows, each row one segment."""
    device = rows.last_tokens.device
    segments = segments_of(work)
    num_extend = work.num_extend_tokens
    parts = work.extends
    row_ids = np.concatenate(
        [np.full(len(part.token_ids), part.row_id, np.int64) for part in parts] + [work.decode_rows]
    )
    positions = np.concatenate(
        [np.arange(part.cached_len, part.cached_len + len(part.token_ids)) for part in parts]
        + [work.decode_positions]
    )
    ids = torch.empty(work.num_tokens, dtype=torch.int64, device=device)
    if num_extend:
        given = np.concatenate([part.token_ids for part in parts])
        ids[:num_extend] = to_device(given, device)
    if len(work.decode_rows):
        ids[num_extend:] = rows.last_tokens[to_device(work.decode_rows, device)]
    last = [
        segment.start + segment.length - 1
        for segment, part in zip(segments, parts, strict=False)
        if part.is_last
    ]
    at = np.concatenate([np.array(last, np.int64), np.arange(num_extend, work.num_tokens)])
    context = StepContext(
        positions=to_device(positions, device),
        rows=to_device(row_ids, device),
        page_table=rows.pages.device,
        segments=segments,
        pools=pools,
    )
    return Batch(ids, context, to_device(at, device))


def pieces_of(work: Work, max_tokens: int) -> list[Work]:
    """The work itself if it is small enough, else split."""
    return [work] if work.num_tokens <= max_tokens else list(split(work, max_tokens))


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
