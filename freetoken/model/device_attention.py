"""Attention through kernels: what serves on a GPU; with the reference kernels it runs on a CPU too.

On demand it reads tensors only, so that a step can be captured in a CUDA graph. In a pass a row's
tokens attend as a whole: to their own k/v, or, where the row has cached tokens, to all of its k/v,
gathered from its pages once per chunk and layer. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from freetoken.kernels.attention_ops import (
    extend_attention,
    paged_attention,
    store_kv,
    store_kv_paged,
)
from freetoken.model.context import Segment, StepContext
from freetoken.model.scores import Scores
from freetoken.model.step import first_key, seq_len

MAX_KEPT_ROWS = 16
"""Rows of a pass for which it is kept where their k/v lie; the memory plan prices them. For more
it is found again in each layer."""


class DeviceAttention:
    """A StepAttention; one per model."""

    takes_padding = True

    def __init__(self) -> None:
        self._step: OnDemandAttention | ChunkAttention | None = None

    def plan_step(self, context: StepContext) -> OnDemandAttention:
        """See StepAttention."""
        return OnDemandAttention(context)

    def plan_chunks(self, contexts: Sequence[StepContext]) -> list[ChunkAttention]:
        """See StepAttention."""
        slots = RowSlots(contexts)
        return [ChunkAttention(context, slots) for context in contexts]

    def set_step(self, step: OnDemandAttention | ChunkAttention | None) -> None:
        """See StepAttention."""
        self._step = step

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
        window: int | None,
    ) -> torch.Tensor:
        """See LayerAttention."""
        assert self._step is not None, "attention called outside ServedModel.forward"
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return self._step.attend(layer, q, k, v, scores, window)[None]


@dataclass(frozen=True, slots=True)
class OnDemandAttention:
    """One on-demand step."""

    context: StepContext

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
        window: int | None,
    ) -> torch.Tensor:
        """query: [T, H, Dk], key: [T, G, Dk], value: [T, G, Dv] → [T, H, Dv]."""
        context = self.context
        k_pool, v_pool = context.pools.k[layer], context.pools.v[layer]
        places = (context.page_table, context.rows, context.positions, context.num_tokens)
        store_kv_paged(key, value, k_pool, v_pool, *places)
        return paged_attention(
            query,
            k_pool,
            v_pool,
            *places,
            scaling=scores.scale_of(query),
            window=window,
            softcap=scores.softcap,
            sinks=scores.sinks,
        )


class RowSlots:
    """Where the k/v of a pass's rows lie, found when first asked for."""

    def __init__(self, contexts: Sequence[StepContext]) -> None:
        """`contexts`: of all chunks, in order."""
        self._ends = {
            segment.row_id: seq_len(segment) for context in contexts for segment in context.segments
        }
        self._kept: dict[int, torch.Tensor] = {}

    def of(self, context: StepContext, segment: Segment, window: int | None) -> torch.Tensor:
        """[L] int32: flat pool slots of the positions that the segment's tokens attend to."""
        slots = self._kept.get(segment.row_id)
        if slots is None:
            slots = self._find(context, segment.row_id)
            if len(self._kept) < MAX_KEPT_ROWS:
                self._kept[segment.row_id] = slots
        return slots[first_key(segment, window) : seq_len(segment)]

    def _find(self, context: StepContext, row_id: int) -> torch.Tensor:
        size = context.pools.page_size
        pages = context.page_table[row_id, : -(-self._ends[row_id] // size)]
        places = torch.arange(size, dtype=torch.int32, device=pages.device)
        return (pages[:, None] * size + places).flatten()


class ChunkAttention:
    """One chunk of a pass; index tensors are made once and serve all layers."""

    def __init__(self, context: StepContext, row_slots: RowSlots) -> None:
        size = context.pools.page_size
        pages = context.page_table[context.rows, context.positions // size]
        self._context = context
        self._write_slots = pages.to(torch.int64) * size + context.positions % size
        self._row_slots = row_slots

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
        window: int | None,
    ) -> torch.Tensor:
        """query: [T, H, Dk], key: [T, G, Dk], value: [T, G, Dv] → [T, H, Dv]."""
        pools = self._context.pools
        k_pool, v_pool = pools.k[layer], pools.v[layer]
        store_kv(key, value, k_pool, v_pool, self._write_slots)
        parts = []
        for segment in self._context.segments:
            tokens = slice(segment.start, segment.start + segment.length)
            k, v = key[tokens], value[tokens]
            if segment.cached_len:
                slots = self._row_slots.of(self._context, segment, window)
                k = k_pool.flatten(0, 1).index_select(0, slots)
                v = v_pool.flatten(0, 1).index_select(0, slots)
            part = extend_attention(
                query[tokens],
                k,
                v,
                scaling=scores.scale_of(query),
                window=window,
                softcap=scores.softcap,
                sinks=scores.sinks,
            )
            del k, v  # before the next row's are gathered
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
