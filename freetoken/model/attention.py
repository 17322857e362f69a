"""The one attention function: writes k/v of the new tokens to the paged pool, attends exactly.

transformers' models call it through AttentionInterface under the name ATTENTION. It takes
everything from its arguments and from the LayerAttention that hangs on the calling module. No mask
function is registered for the name, so transformers builds no masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import nn
from transformers import AttentionInterface

from freetoken.model import ops
from freetoken.model.context import StepContext
from freetoken.model.scores import Scores
from freetoken.model.step import DecodeGroup, ExtendGroup, StepIndex

ATTENTION = "freetoken"
ATTENTION_ATTRIBUTE = "freetoken_attention"
SEAT_ATTRIBUTE = "freetoken_attention_seat"
MakeSeat = Callable[[int], torch.Tensor]


class LayerAttention(Protocol):
    """What hangs on attention modules.

    query: [1, H, T, Dk], key: [1, G, T, Dk], value: [1, G, T, Dv] → [1, T, H, Dv].
    """

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
        window: int | None,
    ) -> torch.Tensor: ...


class StepAttention(LayerAttention, Protocol):
    """Attention of a model that serves: it is told which step's tokens the next calls bring.

    `takes_padding`: steps may have tokens beyond `num_tokens`, and no segments then.
    """

    takes_padding: bool

    def plan_step(self, context: StepContext) -> object:
        """What `set_step` takes for an on-demand step."""

    def plan_chunks(self, contexts: Sequence[StepContext]) -> Sequence[object]:
        """What `set_step` takes for each chunk of a pass."""

    def set_step(self, step: Any) -> None:
        """None when no forward runs."""


def register_attention() -> None:
    """Make ATTENTION known to transformers; may be called again."""
    AttentionInterface.register(ATTENTION, attention_forward)


def attach_attention(
    model: nn.Module, attention: LayerAttention, make_seat: MakeSeat | None = None
) -> None:
    """Put `attention` on every module that knows its layer, which attention modules do.

    `make_seat`: for models that may be compiled, see model/ops.py.
    """
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, ATTENTION_ATTRIBUTE, attention)
            if make_seat is not None:
                setattr(module, SEAT_ATTRIBUTE, make_seat(cast(int, module.layer_idx)))


def attend_for(attention: LayerAttention) -> ops.Attend:
    """`attention` as the operator calls it."""

    def attend(
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
        window: int | None,
    ) -> torch.Tensor:
        return attention(layer, query, key, value, Scores(scaling, softcap, sinks), window)

    return attend


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls; see LayerAttention for the shapes.

    The window is the argument `sliding_window`, if there is one, else the module's own; 0 and None
    mean none. qwen2_moe and phimoe pass it only through the mask, which does not exist here;
    exaone_moe passes None for its full layers, and their modules have a window.
    """
    if "sliding_window" in others:
        sliding_window = others["sliding_window"]
    else:
        sliding_window = getattr(module, "sliding_window", None)
    if torch.compiler.is_compiling():
        seat = getattr(module, SEAT_ATTRIBUTE)
        window = sliding_window or None
        out = ops.attention(query, key, value, s_aux, seat, scaling, softcap, window)
        return cast(torch.Tensor, out), None
    attention = cast(LayerAttention, getattr(module, ATTENTION_ATTRIBUTE))
    scores = Scores(scaling, softcap, s_aux)
    layer = cast(int, module.layer_idx)
    return attention(layer, query, key, value, scores, sliding_window or None), None


class PagedAttention:
    """Exact attention over the pages of the running step, on the CPU; one per model."""

    takes_padding = False

    def __init__(self) -> None:
        self._index: StepIndex | None = None

    def plan_step(self, context: StepContext) -> StepIndex:
        """See StepAttention."""
        return StepIndex(context)

    def plan_chunks(self, contexts: Sequence[StepContext]) -> list[StepIndex]:
        """See StepAttention."""
        return [StepIndex(context) for context in contexts]

    def set_step(self, step: StepIndex | None) -> None:
        """See StepAttention."""
        self._index = step

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
        window: int | None,
    ) -> torch.Tensor:
        """See LayerAttention. Writes key and value to the layer's pools."""
        index = self._index
        assert index is not None, "attention called outside ServedModel.forward"
        pools = index.context.pools
        k_slots = pools.k[layer].flatten(0, 1)
        v_slots = pools.v[layer].flatten(0, 1)
        k_slots.index_copy_(0, index.write_slots, key[0].transpose(0, 1))
        v_slots.index_copy_(0, index.write_slots, value[0].transpose(0, 1))
        plan = index.plan(window, query.dtype)
        num_tokens = query.shape[2]
        out = None
        for extend in plan.extends:
            part = _extend(query, key, value, k_slots, v_slots, extend, scores)
            if extend.length == num_tokens:
                return part
            out = _place(out, slice(extend.start, extend.start + extend.length), part, num_tokens)
        for decode in plan.decodes:
            part = _decode(query, k_slots, v_slots, decode, scores)
            if decode.num_rows == num_tokens and isinstance(decode.tokens, slice):
                return part
            out = _place(out, decode.tokens, part, num_tokens)
        assert out is not None, "a step without tokens"
        return out


def _place(
    out: torch.Tensor | None, tokens: slice | torch.Tensor, part: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    if out is None:
        out = part.new_empty(1, num_tokens, *part.shape[2:])
    out[:, tokens] = part
    return out


def _extend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_slots: torch.Tensor,
    v_slots: torch.Tensor,
    group: ExtendGroup,
    scores: Scores,
) -> torch.Tensor:
    tokens = slice(group.start, group.start + group.length)
    q = query[:, :, tokens]
    if group.slots is None:
        k, v = key[:, :, tokens], value[:, :, tokens]
    else:
        k = k_slots[group.slots].transpose(0, 1)[None]
        v = v_slots[group.slots].transpose(0, 1)[None]
    return scores.attend(q, k, v, group.bias, causal=group.bias is None).transpose(1, 2)


def _decode(
    query: torch.Tensor,
    k_slots: torch.Tensor,
    v_slots: torch.Tensor,
    group: DecodeGroup,
    scores: Scores,
) -> torch.Tensor:
    """One token per row: the H / G heads that share a kv head become its queries."""
    rows, heads, size = group.num_rows, query.shape[1], query.shape[3]
    kv_heads = k_slots.shape[1]
    q = query[0, :, group.tokens].transpose(0, 1).reshape(rows, kv_heads, heads // kv_heads, size)
    if isinstance(group.slots, slice):
        k = k_slots[group.slots][None].transpose(1, 2)
        v = v_slots[group.slots][None].transpose(1, 2)
    else:
        flat = group.slots.flatten()
        k = k_slots.index_select(0, flat).view(rows, -1, *k_slots.shape[1:]).transpose(1, 2)
        v = v_slots.index_select(0, flat).view(rows, -1, *v_slots.shape[1:]).transpose(1, 2)
    out = scores.attend(q, k, v, group.bias, causal=False, folded=True)
    return out.reshape(1, rows, heads, v.shape[-1])
