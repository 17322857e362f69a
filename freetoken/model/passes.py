"""Passes: all chunks of a step through one decoder layer, then all through the next.

During a pass each decoder layer in the model's ModuleList is replaced by a ChunkedLayer. With k/v
in pages this is exact: a chunk finds its predecessors' k/v in the pools. Temporaries are
chunk-sized; only the residual [1, T, C] and the layers' common arguments have all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from freetoken.errors import ConfigError
from freetoken.model.attention import PagedAttention
from freetoken.model.context import StepContext
from freetoken.model.step import StepIndex, cut_context


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `[lo, hi)` of the flat batch and their own index."""

    lo: int
    hi: int
    index: StepIndex


def cut_chunks(context: StepContext, chunk_tokens: int) -> list[Chunk]:
    """Cut a step into chunks of at most `chunk_tokens` tokens."""
    assert chunk_tokens >= 1
    num_tokens = len(context.positions)
    bounds = [(lo, min(lo + chunk_tokens, num_tokens)) for lo in range(0, num_tokens, chunk_tokens)]
    return [Chunk(lo, hi, StepIndex(cut_context(context, lo, hi))) for lo, hi in bounds]


def find_decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers; ConfigError if there is not exactly one."""
    num_layers = model.config.get_text_config().num_hidden_layers
    found = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and name.rpartition(".")[2] == "layers"
        and len(module) == num_layers
    ]
    if len(found) != 1:
        raise ConfigError(
            f"{type(model).__name__} has {len(found)} lists of {num_layers} decoder layers, "
            "expected one"
        )
    return found[0]


@contextmanager
def chunked_layers(
    layers: nn.ModuleList, chunks: Sequence[Chunk], attention: PagedAttention
) -> Iterator[None]:
    """Within the context, every layer of `layers` runs its tokens chunk by chunk."""
    plain = list(layers)
    try:
        for i, layer in enumerate(plain):
            layers[i] = ChunkedLayer(layer, chunks, attention)
        yield
    finally:
        for i, layer in enumerate(plain):
            layers[i] = layer


class ChunkedLayer(nn.Module):
    """A decoder layer called once per chunk; its other attributes are the layer's."""

    def __init__(
        self, layer: nn.Module, chunks: Sequence[Chunk], attention: PagedAttention
    ) -> None:
        super().__init__()
        self._layer = layer
        self._chunks = chunks
        self._attention = attention

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_layer"), name)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden: [1, T, C]; every argument with T as its second dimension is cut alike."""
        num_tokens = hidden.shape[1]
        out = torch.empty_like(hidden)
        rest: tuple[Any, ...] | None = None
        for chunk in self._chunks:
            self._attention.set_step(chunk.index)
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
                return value[:, self.lo : self.hi]
            if value.dim() == 1 and value.shape[0] == self.num_tokens:
                return value[self.lo : self.hi]
        elif isinstance(value, tuple):
            return tuple(self(item) for item in value)
        elif isinstance(value, dict):
            return {name: self(item) for name, item in value.items()}
        return value
