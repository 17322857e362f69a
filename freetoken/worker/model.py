"""What the worker needs of a loaded model: model.served.ServedModel, or a test's fake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from freetoken.model.context import StepContext


class Counters(Protocol):
    """What experts cost."""

    @property
    def slot_hits(self) -> int: ...
    @property
    def slot_misses(self) -> int: ...
    @property
    def expert_bytes(self) -> int: ...
    @property
    def distinct_experts(self) -> int: ...


class OpenPass(Protocol):
    """A pass that can be left between layers."""

    def advance(self, num_layers: int | None = None) -> bool:
        """Run the next layers (None: all that are left); True when the pass is done."""
        ...

    def logits(self) -> Tensor:
        """[n, V] f32 of a pass that is done."""
        ...

    def close(self) -> None: ...


class Model(Protocol):
    """Runs forwards. What comes after `take_counters` is asked of a model on a GPU only.

    num_layers: decoder layers, between which a pass may be left · counters: [4] int64 on the
    device, what on-demand steps have cost so far · pass_distinct: [1] int64 on the device, experts
    that passes have asked for so far; both None if nothing is counted there.
    """

    @property
    def num_layers(self) -> int: ...
    @property
    def counters(self) -> Tensor | None: ...
    @property
    def pass_distinct(self) -> Tensor | None: ...

    def forward(self, ids: Tensor, context: StepContext, logits_at: Tensor) -> Tensor: ...

    def start_pass(
        self, ids: Tensor, context: StepContext, logits_at: Tensor, chunk_tokens: int
    ) -> OpenPass: ...

    def take_counters(self, on_demand: Sequence[int] | None = None) -> Counters:
        """Since the last call. `on_demand`: what the caller has read from both; without it
        they are read here, which waits for the device."""
        ...

    @property
    def device(self) -> torch.device: ...
    @property
    def can_capture(self) -> bool:
        """Whether `forward` may be captured in a CUDA graph."""
        ...

    @property
    def bank_rows(self) -> Tensor | None:
        """[E, row_bytes] uint8 cpu, the experts of one layer; None without slots."""
        ...

    def compile(self) -> None:
        """Compile decoder layers on first use. Before any forward is captured."""
        ...

    def fill_slots(self) -> None:
        """Give every slot an expert. Between steps."""
        ...

    def resize_slots(self, num_slots: int) -> None:
        """Take memory for so many slots instead; all are empty then. Not between a forward and
        its replay from a graph."""
        ...
