"""A loaded model that runs steps: what the worker holds.

One forward is one step of the scheduler: a flat batch of tokens of several rows, k/v in the
worker's paged pools. Not thread-safe; the worker's step loop is the only caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from freetoken.experts.inplace import InPlaceExperts
from freetoken.experts.slots import SlotPool
from freetoken.experts.stream import PassRing
from freetoken.kernels.hugepages import MemoryRange
from freetoken.model.attention import StepAttention
from freetoken.model.compile import make_compiler
from freetoken.model.context import StepContext
from freetoken.model.decoder import find_decoder_layers, with_layers
from freetoken.model.experts import number_moe_layers
from freetoken.model.open_pass import BeforeLayer, OpenPass, PassThread
from freetoken.model.ops import Callees
from freetoken.model.passes import PassRun, PassSeat, chunked_model, cut_chunks
from freetoken.model.shape import ModelShape
from freetoken.model.step import cut_padding


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


@dataclass(frozen=True, slots=True)
class SlotCache:
    """The slots of a model, and what its passes stream through."""

    pool: SlotPool
    ring: PassRing


class ServedModel:
    """Runs forwards; logits come back as float32.

    `memory`: where the weights lie that each step reads on the CPU · `device`: where the tensors of
    a step must be.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shape: ModelShape,
        attention: StepAttention,
        callees: Callees,
        in_place: Sequence[InPlaceExperts],
        slots: SlotCache | None,
        memory: Sequence[MemoryRange],
    ) -> None:
        """`callees`: kept here for the operators that layers call."""
        self.shape = shape
        self.memory = memory
        self.device: torch.device = model.device
        self._plain = self._model = model
        self._attention = attention
        self._callees = callees
        self._in_place = in_place
        self._slots = slots
        self._ring = None if slots is None else slots.ring
        self._taken = [0, 0, 0, 0]
        self._taken_distinct = 0
        self._pass_thread = PassThread()
        self._layers = list(find_decoder_layers(model))
        self._moe_layers = number_moe_layers(self._layers)
        self._seat = PassSeat()
        self._pass_model = chunked_model(model, self._layers, self._seat)

    @property
    def num_layers(self) -> int:
        """Decoder layers; a pass can be left between them."""
        return len(self._layers)

    @torch.inference_mode()
    def forward(
        self, ids: torch.Tensor, context: StepContext, logits_at: torch.Tensor
    ) -> torch.Tensor:
        """One on-demand step.

        ids: [T] int64 · logits_at: [n] int64, indices into the flat batch · returns [n, V] float32.
        Writes k/v of all T tokens to the context's pools. What slots of other rows hold, even
        infinities, has no influence.
        """
        if context.num_tokens is not None and not self._attention.takes_padding:
            ids, context, logits_at = cut_padding(ids, context, logits_at)
        self._attention.set_step(self._attention.plan_step(context))
        if self._slots is not None:
            self._slots.pool.begin_step(context.num_tokens)
        try:
            return self._run(self._model, ids, context, logits_at)
        finally:
            self._attention.set_step(None)
            if self._slots is not None:
                self._slots.pool.end_step()

    @torch.inference_mode()
    def forward_pass(
        self, ids: torch.Tensor, context: StepContext, logits_at: torch.Tensor, chunk_tokens: int
    ) -> torch.Tensor:
        """One pass: like `forward`, layer by layer in chunks of `chunk_tokens` tokens.

        Each expert that is not in a slot is loaded once, whatever the number of chunks. For a pass
        that nothing interrupts, in the caller's thread.
        """
        run = self._make_run(context, chunk_tokens, lambda: None)
        try:
            run.begin()
            return self._run(self._pass_model, ids, context, logits_at)
        finally:
            run.end()
            self._seat.run = None

    @torch.inference_mode()
    def start_pass(
        self, ids: torch.Tensor, context: StepContext, logits_at: torch.Tensor, chunk_tokens: int
    ) -> OpenPass:
        """A pass that runs as far as it is advanced; between its layers `forward` may be called.

        One at a time: it must be done or closed before the next pass. Nothing runs yet.
        """

        def make_run(before_layer: BeforeLayer) -> PassRun:
            return self._make_run(context, chunk_tokens, before_layer)

        def forward() -> torch.Tensor:
            return self._run(self._pass_model, ids, context, logits_at)

        def ended() -> None:
            self._seat.run = None

        return OpenPass(make_run, forward, self.device, ended, self._pass_thread)

    @property
    def can_capture(self) -> bool:
        """Whether `forward` may be captured in a CUDA graph: nothing in it waits for the device."""
        is_pinned = self._slots is None or self._slots.pool.is_pinned
        return self.device.type == "cuda" and is_pinned

    @property
    def counters(self) -> torch.Tensor | None:
        """[4] int64 on the device, of all on-demand steps so far: hits, misses, distinct experts,
        bypassed (misses without a slot). Changes with every forward; None with experts in place."""
        return None if self._slots is None else self._slots.pool.tables.counters

    @property
    def pass_distinct(self) -> torch.Tensor | None:
        """[1] int64 on the device: experts that passes have asked for so far, once per layer."""
        return None if self._ring is None else self._ring.distinct

    @property
    def bank_rows(self) -> torch.Tensor | None:
        """[E, row_bytes] uint8 cpu, the experts of the first layer that has any; None without
        slots."""
        return None if self._slots is None else self._slots.pool.banks[0].rows

    def resize_slots(self, num_slots: int) -> None:
        """Another number of slots, all empty. Before any forward is captured; no pass is open."""
        assert self._slots is not None
        assert self._seat.run is None, "a pass is open"
        pool, ring = self._slots.pool, self._slots.ring
        # Nothing may hold on to the old memory.
        ring.follow(pool.rows.new_empty(0), pool.tables.slot_of.new_empty(0))
        pool.resize(num_slots)
        ring.follow(pool.rows, pool.tables.slot_of)
        self._taken = [0, 0, 0, 0]

    def fill_slots(self) -> None:
        """Give every slot an expert, where there are slots; counters start again. No pass is
        open."""
        if self._slots is None:
            return
        assert self._seat.run is None, "a pass is open"
        self.take_counters()
        self._slots.pool.fill()
        self._taken = [0, 0, 0, 0]

    def take_counters(self, on_demand: Sequence[int] | None = None) -> ExpertCounters:
        """Counters since the last call.

        `on_demand`: what the caller read from `counters` and `pass_distinct`, five numbers;
        without it they are read here, which waits for the device.
        """
        if self._slots is None:
            return ExpertCounters(distinct_experts=sum(e.take_distinct() for e in self._in_place))
        pool, ring = self._slots.pool, self._slots.ring
        if on_demand is None:
            on_demand = [*pool.tables.counters.tolist(), int(ring.distinct)]
        *now, in_passes = on_demand
        hits, misses, distinct, _ = (n - old for n, old in zip(now, self._taken, strict=True))
        self._taken = now
        if ring.has_entered:
            distinct += in_passes - self._taken_distinct
            self._taken_distinct = in_passes
            hits, misses = hits + ring.hits, misses + ring.misses
            ring.hits = ring.misses = 0
            ring.has_entered = False
        return ExpertCounters(hits, misses, misses * pool.layout.row_bytes, distinct)

    def compile(self) -> None:
        """Run layers as compiled code if they can be, and then compute what they did; see
        compile_checked. Before a forward is captured."""
        from freetoken.model.compile_check import compile_checked  # which needs this class

        compile_checked(self)

    def compile_layers(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Run layers as compiled code, made when a number of tokens first needs it.

        `backend`: one of torch.compile's.
        """
        assert self._seat.run is None, "a pass is open"
        compiled = make_compiler(backend)
        layers = [compiled(layer) for layer in self._layers]
        self._model = with_layers(self._plain, layers, compiled)
        self._pass_model = chunked_model(self._model, layers, self._seat)

    def run_eagerly(self) -> None:
        """Run layers as they are, as before `compile_layers`."""
        assert self._seat.run is None, "a pass is open"
        self._model = self._plain
        self._pass_model = chunked_model(self._plain, self._layers, self._seat)

    def _make_run(
        self, context: StepContext, chunk_tokens: int, before_layer: BeforeLayer
    ) -> PassRun:
        assert self._seat.run is None, "a pass is open"
        chunks = cut_chunks(context, chunk_tokens, self._attention)
        run = self._seat.run = PassRun(
            chunks, self._attention, self._ring, self._moe_layers, before_layer
        )
        return run

    def _run(
        self,
        model: PreTrainedModel,
        ids: torch.Tensor,
        context: StepContext,
        logits_at: torch.Tensor,
    ) -> torch.Tensor:
        output = model(
            input_ids=ids[None],
            position_ids=context.positions[None],
            use_cache=False,
            logits_to_keep=logits_at,
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits
