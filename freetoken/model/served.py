"""A loaded model that runs steps: what the worker holds.

One forward is one step of the scheduler: a flat batch of tokens of several rows, k/v in the
worker's paged pools. Not thread-safe; the worker's step loop is the only caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from freetoken.experts.inplace import InPlaceExperts
from freetoken.experts.slots import SlotCounters, SlotPool
from freetoken.kernels.hugepages import MemoryRange
from freetoken.model.attention import PagedAttention
from freetoken.model.context import StepContext
from freetoken.model.passes import chunked_layers, cut_chunks
from freetoken.model.shape import ModelShape
from freetoken.model.step import StepIndex


@dataclass(frozen=True, slots=True)
class ExpertCounters:
    """What expert weights were asked for since the last look, summed over layers.

    slot_hits and slot_misses: experts found in a slot, or loaded from a bank · expert_bytes:
    loaded · distinct_experts: experts that tokens asked for, once per layer and step. With experts
    in place only the last is counted.
    """

    slot_hits: int = 0
    slot_misses: int = 0
    expert_bytes: int = 0
    distinct_experts: int = 0


class ServedModel:
    """Runs forwards; logits come back as float32.

    `memory`: where the weights lie that each step reads on the CPU.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shape: ModelShape,
        attention: PagedAttention,
        layers: nn.ModuleList,
        in_place: Sequence[InPlaceExperts],
        pool: SlotPool | None,
        memory: Sequence[MemoryRange],
    ) -> None:
        self.shape = shape
        self._model = model
        self._attention = attention
        self._layers = layers
        self._in_place = in_place
        self._pool = pool
        self.memory = memory

    @torch.inference_mode()
    def forward(
        self, ids: torch.Tensor, context: StepContext, logits_at: torch.Tensor
    ) -> torch.Tensor:
        """One on-demand step.

        ids: [T] int64 · logits_at: [n] int64, indices into the flat batch · returns [n, V] float32.
        Writes k/v of all T tokens to the context's pools. What slots of other rows hold, even
        infinities, has no influence.
        """
        self._attention.set_step(StepIndex(context))
        try:
            return self._run(ids, context, logits_at)
        finally:
            self._attention.set_step(None)

    @torch.inference_mode()
    def forward_pass(
        self, ids: torch.Tensor, context: StepContext, logits_at: torch.Tensor, chunk_tokens: int
    ) -> torch.Tensor:
        """One pass: like `forward`, layer by layer in chunks of `chunk_tokens` tokens.

        Each expert that is not in a slot is loaded once, whatever the number of chunks.
        """
        chunks = cut_chunks(context, chunk_tokens)
        if self._pool is not None:
            self._pool.begin_pass()
        try:
            with chunked_layers(self._layers, chunks, self._attention):
                return self._run(ids, context, logits_at)
        finally:
            self._attention.set_step(None)
            if self._pool is not None:
                self._pool.end_pass()

    def take_counters(self) -> ExpertCounters:
        """Counters since the last call."""
        if self._pool is not None:
            counters, self._pool.counters = self._pool.counters, SlotCounters()
            return ExpertCounters(counters.hits, counters.misses, counters.bytes, counters.distinct)
        return ExpertCounters(distinct_experts=sum(e.take_distinct() for e in self._in_place))

    def _run(
        self, ids: torch.Tensor, context: StepContext, logits_at: torch.Tensor
    ) -> torch.Tensor:
        output = self._model(
            input_ids=ids[None],
            position_ids=context.positions[None],
            use_cache=False,
            logits_to_keep=logits_at,
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits
