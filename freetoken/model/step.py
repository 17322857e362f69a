"""The current step as attention needs it: index tensors computed once, used by every layer.

ServedModel makes a StepIndex of each StepContext and hands it to the model's PagedAttention for the
time of a forward. The worker knows none of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from freetoken.model.context import Segment, StepContext

MAX_GATHERED_KEYS = 1 << 16
"""Keys that decode rows gather at a time, of a single longer row all. Rows that share a long prefix
each gather it, so without a limit this could exceed the pool itself; the memory plan prices it."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows with one new token each, of similar length, attended as one padded batch.

    tokens: their places in the flat batch · slots: [B, L] flat pool slots, padded with the row's
    own last slot, or the slice `[lo, hi)` of a single row whose pages lie side by side ·
    bias: [B, 1, 1, L], 0 or -inf; None when nothing is padded.
    """

    tokens: slice | torch.Tensor
    num_rows: int
    slots: slice | torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ExtendGroup:
    """One row with several new tokens `[start, start + length)` of the flat batch.

    slots: [L] flat pool slots of the keys, or a slice, or None when the row has nothing but its new
    tokens (then their k/v are used directly) · bias: [length, L], lower-right causal and window;
    None means plain causal.
    """

    start: int
    length: int
    slots: slice | torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which tokens attend to which slots, for one window size."""

    decodes: tuple[DecodeGroup, ...]
    extends: tuple[ExtendGroup, ...]


class StepIndex:
    """Index tensors of one StepContext; plans are built per window on first use."""

    def __init__(self, context: StepContext) -> None:
        size = context.pools.page_size
        pages = context.page_table[context.rows, context.positions // size]
        self.context = context
        self.write_slots = pages.to(torch.int64) * size + context.positions % size
        self._plans: dict[tuple[int | None, torch.dtype], AttentionPlan] = {}

    def plan(self, window: int | None, dtype: torch.dtype) -> AttentionPlan:
        """The plan for `window` (None: no window); biases are of `dtype`, that of the queries."""
        plan = self._plans.get((window, dtype))
        if plan is None:
            plan = self._plans[window, dtype] = _plan(self.context, window, dtype)
        return plan


def cut_context(context: StepContext, lo: int, hi: int) -> StepContext:
    """The part of a step that holds tokens `[lo, hi)` of its flat batch."""
    segments = []
    for segment in context.segments:
        start = max(segment.start, lo)
        end = min(segment.start + segment.length, hi)
        if start < end:
            cached_len = segment.cached_len + start - segment.start
            segments.append(Segment(segment.row_id, start - lo, end - start, cached_len))
    return StepContext(
        positions=context.positions[lo:hi],
        rows=context.rows[lo:hi],
        page_table=context.page_table,
        segments=tuple(segments),
        pools=context.pools,
    )


def cut_padding(
    ids: torch.Tensor, context: StepContext, logits_at: torch.Tensor
) -> tuple[torch.Tensor, StepContext, torch.Tensor]:
    """A padded step without its padding: where shapes are free, there is no use for it.

    Waits for the device. Logits that are asked of padding become those of the last token.
    """
    assert context.num_tokens is not None
    end = int(context.num_tokens)
    cut = replace(
        context, positions=context.positions[:end], rows=context.rows[:end], num_tokens=None
    )
    return ids[:end], cut, logits_at.clamp(max=end - 1)


def _plan(context: StepContext, window: int | None, dtype: torch.dtype) -> AttentionPlan:
    groups: dict[int, list[Segment]] = {}
    extends = []
    for segment in context.segments:
        if segment.length == 1:
            # Rows are padded to the longest of their group: a group spans a factor of two.
            num_keys = seq_len(segment) - first_key(segment, window)
            groups.setdefault(num_keys.bit_length(), []).append(segment)
        else:
            extends.append(_plan_extend(context, segment, window, dtype))
    decodes = [
        _plan_decode(context, rows, window, dtype)
        for group in groups.values()
        for rows in _cut_group(group, window)
    ]
    return AttentionPlan(tuple(decodes), tuple(extends))


def _cut_group(segments: list[Segment], window: int | None) -> Iterator[list[Segment]]:
    """Parts of a group of decode rows that gather at most MAX_GATHERED_KEYS with padding."""
    longest = max(seq_len(segment) - first_key(segment, window) for segment in segments)
    count = max(1, MAX_GATHERED_KEYS // longest)
    for first in range(0, len(segments), count):
        yield segments[first : first + count]


def seq_len(segment: Segment) -> int:
    """Tokens of the segment's row after the step."""
    return segment.cached_len + segment.length


def first_key(segment: Segment, window: int | None) -> int:
    """The oldest position that the segment's first token attends to."""
    return 0 if window is None else max(0, segment.cached_len + 1 - window)


def _plan_decode(
    context: StepContext, segments: list[Segment], window: int | None, dtype: torch.dtype
) -> DecodeGroup:
    starts = [segment.start for segment in segments]
    tokens: slice | torch.Tensor
    if starts == list(range(starts[0], starts[0] + len(starts))):
        tokens = slice(starts[0], starts[0] + len(starts))
    else:
        tokens = torch.tensor(starts, device=context.positions.device)
    if len(segments) == 1:
        segment = segments[0]
        slots = _row_slots(context, segment, first_key(segment, window))
        if not isinstance(slots, slice):
            slots = slots[None]
        return DecodeGroup(tokens, 1, slots, None)
    device = context.page_table.device
    firsts = [first_key(segment, window) for segment in segments]
    lengths = [seq_len(segment) - first for segment, first in zip(segments, firsts, strict=True)]
    row_ids = torch.tensor([segment.row_id for segment in segments], device=device)[:, None]
    first = torch.tensor(firsts, device=device)[:, None]
    length = torch.tensor(lengths, device=device)[:, None]
    offsets = torch.arange(max(lengths), device=device)[None]
    slots = _slots(context, row_ids, first + torch.minimum(offsets, length - 1))
    bias = None
    if min(lengths) < max(lengths):
        bias = _bias(offsets < length, dtype)[:, None, None]
    return DecodeGroup(tokens, len(segments), slots, bias)


def _plan_extend(
    context: StepContext, segment: Segment, window: int | None, dtype: torch.dtype
) -> ExtendGroup:
    first, end = first_key(segment, window), seq_len(segment)
    slots = None if segment.cached_len == 0 else _row_slots(context, segment, first)
    bias = None
    if segment.cached_len or (window is not None and window < end):
        device = context.page_table.device
        keys = torch.arange(first, end, device=device)[None]
        queries = torch.arange(segment.cached_len, end, device=device)[:, None]
        visible = keys <= queries
        if window is not None:
            visible &= keys > queries - window
        bias = _bias(visible, dtype)
    return ExtendGroup(segment.start, segment.length, slots, bias)


def _row_slots(context: StepContext, segment: Segment, first: int) -> slice | torch.Tensor:
    """Slots of positions `[first, end)` of one row: a slice if its pages lie side by side."""
    size, end = context.pools.page_size, seq_len(segment)
    first_page = first // size
    pages = context.page_table[segment.row_id, first_page : (end - 1) // size + 1]
    # On a GPU looking at the pages would synchronise; the gather is cheap there.
    if pages.device.type == "cpu":
        base = int(pages[0])
        if base + len(pages) - 1 == int(pages[-1]) and bool((pages.diff() == 1).all()):
            offset = (base - first_page) * size
            return slice(offset + first, offset + end)
    row_id = torch.tensor(segment.row_id, device=pages.device)
    return _slots(context, row_id, torch.arange(first, end, device=pages.device))


def _slots(context: StepContext, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    size = context.pools.page_size
    pages = context.page_table[rows, positions // size].to(torch.int64)
    return pages * size + positions % size


def _bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, float("-inf"))
