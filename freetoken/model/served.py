"""A loaded model that runs steps: what the worker holds.

One forward is one step of the scheduler: a flat batch of tokens of several rows, k/v in the
worker's paged pools. Not thread-safe; the worker's step loop is the only caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from freetoken.model.attention import PagedAttention
from freetoken.model.context import StepContext
from freetoken.model.shape import ModelShape
from freetoken.model.step import StepIndex


@dataclass(frozen=True, slots=True)
class ExpertCounters:
    """What expert weights were asked for since the last look, summed over layers.

    distinct_experts: experts used, counted once per layer and step (in-place experts count too) ·
    slot_hits and slot_misses: of those, found in a slot or not · expert_bytes: copied from banks.
    """

    slot_hits: int = 0
    slot_misses: int = 0
    expert_bytes: int = 0
    distinct_experts: int = 0


class ServedModel:
    """Runs forwards; logits come back as float32."""

    def __init__(
        self, model: PreTrainedModel, shape: ModelShape, attention: PagedAttention
    ) -> None:
        self.shape = shape
        self._model = model
        self._attention = attention

    @torch.inference_mode()
    def forward(
        self, ids: torch.Tensor, context: StepContext, logits_at: torch.Tensor
    ) -> torch.Tensor:
        """One on-demand step.

        ids: [T] int64 · logits_at: [n] int64, indices into the flat batch · returns [n, V] float32.
        Writes k/v of all T tokens to the context's pools.
        """
        self._attention.set_step(StepIndex(context))
        try:
            return self._run(ids, context, logits_at)
        finally:
            self._attention.set_step(None)

    def take_counters(self) -> ExpertCounters:
        """Counters since the last call."""
        return ExpertCounters()

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
