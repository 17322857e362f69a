"""Attention through kernels: what serves on a GPU; with the reference kernels it runs on a CPU too.

On demand it reads tensors only, so that a step can be captured in a CUDA graph. In a pass a row's
tokens attend as a whole: to their own k/v, or, where the row has cached tokens, to all of its k/v,
gathered from its pages once per chunk and layer. Nothing here waits for the device.
"""

from __future__ import annotations

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


class DeviceAttention:
    """A StepAttention; one per model."""

    takes_padding = True

    def __init__(self) -> None:
        self._step: OnDemandAttention | ChunkAttention | None = None

    def plan_step(self, context: StepContext) -> OnDemandAttention:
        """See StepAttention."""
        return OnDemandAttention(context)

    def plan_chunk(self, context: StepContext) -> ChunkAttention:
        """See StepAttention."""
        return ChunkAttention(context)

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


class ChunkAttention:
    """One chunk of a pass; index tensors are made once and serve all layers."""

    def __init__(self, context: StepContext) -> None:
        size = context.pools.page_size
        pages = context.page_table[context.rows, context.positions // size]
        self._context = context
        self._write_slots = pages.to(torch.int64) * size + context.positions % size
        # By window and segment: where the keys of the segment's row lie.
        self._key_slots: dict[tuple[int | None, int], torch.Tensor] = {}

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
        for number, segment in enumerate(self._context.segments):
            tokens = slice(segment.start, segment.start + segment.length)
            if segment.cached_len == 0:
                k, v = key[tokens], value[tokens]
            else:
                slots = self._slots(number, segment, window)
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
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _slots(self, number: int, segment: Segment, window: int | None) -> torch.Tensor:
        """[L] flat pool slots of the positions that the segment's tokens attend to."""
        slots = self._key_slots.get((window, number))
        if slots is None:
            slots = self._key_slots[window, number] = _find_slots(self._context, segment, window)
        return slots


def _find_slots(context: StepContext, segment: Segment, window: int | None) -> torch.Tensor:
    size = context.pools.page_size
    first, end = first_key(segment, window), seq_len(segment)
    first_page = first // size
    pages = context.page_table[segment.row_id, first_page : (end - 1) // size + 1]
    places = torch.arange(size, device=pages.device)
    slots = (pages.to(torch.int64)[:, None] * size + places).flatten()
    return slots[first - first_page * size : end - first_page * size]
