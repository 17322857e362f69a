"""Passes: all chunks of a step through one decoder layer, then all through the next.

The model that runs passes has a ChunkedLayer in place of each decoder layer. With k/v in pages this
is exact: a chunk finds its predecessors' k/v in the pools. Temporaries are chunk-sized; only the
residual [1, T, C] and the layers' common arguments have all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from freetoken.kernels.attention_ops import TILE_SIZES
from freetoken.model.attention import StepAttention
from freetoken.model.context import Segment, StepContext
from freetoken.model.decoder import LayerProxy, with_layers
from freetoken.model.step import cut_context


class PassExperts(Protocol):
    """The experts of a pass, which must be there before a layer computes (experts.slots)."""

    def begin_pass(self) -> None: ...

    def enter_layer(self, layer: int) -> None:
        """The chunks of the layer with experts number `layer` come next."""

    def pause_pass(self) -> None:
        """On-demand steps may follow."""

    def resume_pass(self) -> None: ...

    def end_pass(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[lo, hi)` of the flat batch and what attention knows of them."""

    lo: int
    hi: int
    step: object


def cut_chunks(context: StepContext, chunk_tokens: int, attention: StepAttention) -> list[Chunk]:
    """Cut a step into chunks of at most `chunk_tokens` tokens."""
    bounds = find_bounds(context.segments, chunk_tokens)
    steps = attention.plan_chunks([cut_context(context, lo, hi) for lo, hi in bounds])
    return [Chunk(lo, hi, step) for (lo, hi), step in zip(bounds, steps, strict=True)]


def find_bounds(
    segments: Sequence[Segment], chunk_tokens: int, sizes: Sequence[int] = TILE_SIZES
) -> list[tuple[int, int]]:
    """[lo, hi) of each chunk. One that ends within a row ends at a tile of that row, unless none of
    its tiles begins or ends in the chunk."""
    assert chunk_tokens >= 1
    tile = next((size for size in sizes if size <= chunk_tokens), 1)  # the largest that they hold
    bounds, lo = [], 0
    for segment in segments:
        end = segment.start + segment.length
        while end - lo > chunk_tokens:
            hi = lo + chunk_tokens
            over = (segment.cached_len + hi - segment.start) % tile
            if hi - over >= max(segment.start, lo + 1):
                hi -= over
            bounds.append((lo, hi))
            lo = hi
    if segments:
        bounds.append((lo, end))
    return bounds


class PassRun:
    """The pass that a model's ChunkedLayers run now.

    `moe_layers`: which experts each decoder layer has, if any · `before_layer` is called before
    each layer and may return much later, when other steps have run.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        attention: StepAttention,
        experts: PassExperts | None,
        moe_layers: Sequence[int | None],
        before_layer: Callable[[], None],
    ) -> None:
        self.chunks = chunks
        self._attention = attention
        self._experts = experts
        self._moe_layers = moe_layers
        self._before_layer = before_layer

    def begin(self) -> None:
        if self._experts is not None:
            self._experts.begin_pass()

    def enter_layer(self, layer: int) -> None:
        self._before_layer()
        number = self._moe_layers[layer]
        if self._experts is not None and number is not None:
            self._experts.enter_layer(number)

    def enter_chunk(self, chunk: Chunk) -> None:
        self._attention.set_step(chunk.step)

    def pause(self) -> None:
        self._attention.set_step(None)
        if self._experts is not None:
            self._experts.pause_pass()

    def resume(self) -> None:
        if self._experts is not None:
            self._experts.resume_pass()

    def end(self) -> None:
        self._attention.set_step(None)
        if self._experts is not None:
            self._experts.end_pass()


class PassSeat:
    """Where a model's ChunkedLayers find their pass; one at a time."""

    def __init__(self) -> None:
        self.run: PassRun | None = None


def chunked_model(
    model: PreTrainedModel, layers: Sequence[nn.Module], seat: PassSeat
) -> PreTrainedModel:
    """A second model object whose decoder layers run `layers` in chunks, for passes."""
    return with_layers(model, [ChunkedLayer(layer, i, seat) for i, layer in enumerate(layers)])


class ChunkedLayer(LayerProxy):
    """A decoder layer called once per chunk."""

    def __init__(self, layer: nn.Module, number: int, seat: PassSeat) -> None:
        super().__init__(layer)
        self._number = number
        self._seat = seat

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden: [1, T, C]; every argument with T as its second dimension is cut alike."""
        run = self._seat.run
        assert run is not None, "a chunked layer runs outside a pass"
        run.enter_layer(self._number)
        num_tokens = hidden.shape[1]
        out = torch.empty_like(hidden)
        rest: tuple[Any, ...] | None = None
        for chunk in run.chunks:
            run.enter_chunk(chunk)
            cut = _Cut(num_tokens, chunk.lo, chunk.hi)
            result = self._layer(
                cut(hidden),
                *(cut(argument) for argument in args),
                **{name: cut(argument) for name, argument in kwargs.items()},
            )
            if isinstance(result, tuple):
                result, rest = result[0], result[1:]
            out[:, chunk.lo : chunk.hi] = result
        # What a layer returns beside hidden states (attention weights, always None here).
        return out if rest is None else (out, *rest)


@dataclass(frozen=True, slots=True)
class _Cut:
    num_tokens: int
    lo: int
    hi: int

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.dim() >= 2 and value.shape[1] == self.num_tokens:
                if value.shape[0] == 1:
                    # With the strides of a tensor of its own, as compiled layers expect them.
                    return value[0, self.lo : self.hi][None]
                return value[:, self.lo : self.hi]
            if value.dim() == 1 and value.shape[0] == self.num_tokens:
                return value[self.lo : self.hi]
        elif isinstance(value, tuple):
            return tuple(self(item) for item in value)
        elif isinstance(value, dict):
            return {name: self(item) for name, item in value.items()}
        return value
