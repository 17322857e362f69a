"""What the rest of the worker needs to know about a model before it is loaded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from freetoken.errors import ConfigError
from freetoken.model.attention import attach_attention
from freetoken.model.experts import (
    attach_experts,
    bank_parameters,
    experts_modules,
    num_experts,
    plan_layout,
)
from freetoken.model.rope import constant_rope
from freetoken.model.scores import Scores


@dataclass(frozen=True, slots=True)
class KvShape:
    """k/v of one token in one attention layer: [G, Dk] and [G, Dv]."""

    num_kv_heads: int
    k_dim: int
    v_dim: int

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of k and v that one token holds in this layer."""
        return self.num_kv_heads * (self.k_dim + self.v_dim) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model.

    kv: per attention layer, index i is layer_idx i · window: max_position_embeddings, tokens ·
    expert_bytes: one expert's row in the bank · dense_bytes: every other weight and buffer, tied
    ones once · query_width: elements of one token's queries in the widest layer · linear_width:
    outputs of the widest linear layer but the head · has_scores: a layer has softcap or sinks, so
    that its scores exist as a tensor · tied_head_bytes: the output layer's weight
    where it is tied to the embedding, of which a second, packed copy is made on the CPU; else 0.
    """

    class_name: str
    model_type: str
    num_layers: int
    kv: tuple[KvShape, ...]
    vocab_size: int
    hidden_size: int
    window: int
    num_moe_layers: int
    num_experts: int
    top_k: int
    expert_bytes: int
    dense_bytes: int
    query_width: int
    linear_width: int
    has_scores: bool
    tied_head_bytes: int
    dtype: torch.dtype

    @property
    def bank_bytes(self) -> int:
        """All experts of all layers."""
        return self.num_moe_layers * self.num_experts * self.expert_bytes


class _Recorder:
    """Stands in for attention and experts in a forward without data; notes what it is asked."""

    def __init__(self) -> None:
        self.kv: dict[int, KvShape] = {}
        self.top_k = 0
        self.query_width = 0
        self.has_scores = False

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scores: Scores,
        window: int | None,
    ) -> torch.Tensor:
        """A LayerAttention."""
        self.query_width = max(self.query_width, query.shape[1] * query.shape[3])
        self.has_scores |= not scores.is_plain
        self.kv[layer] = KvShape(key.shape[1], key.shape[3], value.shape[3])
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    def route(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """A LayerExperts."""
        self.top_k = max(self.top_k, ids.shape[-1])
        return torch.empty_like(hidden)


def measure_shape(model: PreTrainedModel) -> ModelShape:
    """Read the sizes off a meta model; a one-token forward on meta shows each layer's k/v.

    Raises ConfigError if the model cannot be run in this way.
    """
    recorder = _Recorder()
    modules = list(experts_modules(model))
    config = model.config.get_text_config()
    layouts = [plan_layout(name, module) for name, module in modules]
    _run_on_meta(model, recorder)
    num_layers = int(config.num_hidden_layers)
    expected = set(range(len(recorder.kv)))
    if not recorder.kv or set(recorder.kv) != expected:
        raise ConfigError(
            f"{type(model).__name__} keeps k/v in layers {sorted(recorder.kv)} of {num_layers} "
            "only; layers with another kind of state are not supported"
        )
    counts = {num_experts(module) for _, module in modules}
    rows = {layout.row_bytes for layout in layouts}
    if len(counts) > 1 or len(rows) > 1:
        raise ConfigError(
            f"{type(model).__name__} has layers with different experts: counts {sorted(counts)}, "
            f"bytes {sorted(rows)}; all layers must be alike"
        )
    return ModelShape(
        class_name=type(model).__name__,
        model_type=str(model.config.model_type),
        num_layers=num_layers,
        kv=tuple(recorder.kv[i] for i in range(len(recorder.kv))),
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        window=int(config.max_position_embeddings),
        num_moe_layers=len(modules),
        num_experts=counts.pop() if counts else 0,
        top_k=recorder.top_k,
        expert_bytes=rows.pop() if rows else 0,
        dense_bytes=_dense_bytes(model),
        query_width=recorder.query_width,
        linear_width=_linear_width(model),
        has_scores=recorder.has_scores,
        tied_head_bytes=_tied_head_bytes(model),
        dtype=model.dtype,
    )


def _dense_bytes(model: nn.Module) -> int:
    banked = {
        id(parameter)
        for _, module in experts_modules(model)
        for parameter in bank_parameters(module).values()
    }
    tensors = [*model.parameters(), *model.buffers()]
    return sum(t.numel() * t.itemsize for t in tensors if id(t) not in banked)


def _linear_width(model: PreTrainedModel) -> int:
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    return max((linear.out_features for linear in linears), default=0)


def _tied_head_bytes(model: PreTrainedModel) -> int:
    weights: list[object] = [
        getattr(module, "weight", None)
        for module in (model.get_output_embeddings(), model.get_input_embeddings())
    ]
    head, embedding = weights
    if not isinstance(head, torch.Tensor) or head is not embedding:
        return 0
    return head.numel() * head.itemsize


def _run_on_meta(model: PreTrainedModel, recorder: _Recorder) -> None:
    attach_attention(model, recorder.attend)
    for _, module in experts_modules(model):
        attach_experts(module, recorder.route)
    zero = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode(), constant_rope(model):
            model(input_ids=zero, position_ids=zero, use_cache=False)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{type(model).__name__} does not run through the attention and experts interfaces: "
            f"{reason}"
        ) from error
