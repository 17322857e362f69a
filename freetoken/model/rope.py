"""Rotary embeddings whose frequencies depend on the longest position of a batch, made constant.

transformers recomputes them in the forward: one row would change its neighbours' logits, and keys
that are cached would disagree with later queries. Here the choice is made once, at load.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from freetoken.errors import EngineError
from freetoken.log import event, get

log = get(__name__)
CONSTANT = "default"


@torch.no_grad()
def check_rope(model: nn.Module, context_tokens: int) -> None:
    """EngineError if requests of `context_tokens` tokens would need frequencies that change with
    their length; weights need not be loaded."""
    for module, rope_type in _rotary_modules(model):
        kinds = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
        limit = module.config.max_position_embeddings
        for kind in kinds:
            if "dynamic" in kind and context_tokens > limit:
                raise EngineError(
                    f"rope type {kind} cannot serve {context_tokens} tokens of context: its "
                    f"frequencies would change beyond {limit}; ask for a smaller context or KV pool"
                )


def fix_rope(model: nn.Module, context_tokens: int) -> None:
    """Fix the frequencies for requests of up to `context_tokens` tokens.

    dynamic: as they are up to max_position_embeddings; EngineError for longer contexts.
    longrope: the short factors if the context fits the original window, else the long ones for
    every request, which differs from transformers in requests shorter than that window.
    """
    check_rope(model, context_tokens)
    for module, rope_type in _rotary_modules(model):
        if isinstance(rope_type, str):
            _fix(module, rope_type, None, context_tokens)
        else:
            for layer_type, kind in rope_type.items():
                _fix(module, kind, layer_type, context_tokens)
        module.rope_type = _constant(rope_type)


@contextmanager
def constant_rope(model: nn.Module) -> Iterator[None]:
    """Within the context no frequency is recomputed: for a forward without data."""
    modules = list(_rotary_modules(model))
    try:
        for module, rope_type in modules:
            module.rope_type = _constant(rope_type)
        yield
    finally:
        for module, rope_type in modules:
            module.rope_type = rope_type


def _rotary_modules(model: nn.Module) -> Iterator[tuple[Any, str | dict[str, str]]]:
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str | dict):
            yield module, rope_type


def _constant(rope_type: str | dict[str, str]) -> str | dict[str, str]:
    """The type under which transformers leaves the frequencies as they are."""
    if isinstance(rope_type, dict):
        return {layer_type: str(_constant(kind)) for layer_type, kind in rope_type.items()}
    return CONSTANT if "dynamic" in rope_type or rope_type == "longrope" else rope_type


def _fix(module: nn.Module, rope_type: str, layer_type: str | None, context_tokens: int) -> None:
    config: Any = module.config
    if rope_type != "longrope":
        return
    parameters = config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    original = parameters["original_max_position_embeddings"]
    if context_tokens <= original:
        return
    options = {} if layer_type is None else {"layer_type": layer_type}
    inv_freq, _ = ROPE_INIT_FUNCTIONS[rope_type](config, None, seq_len=original + 1, **options)
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    getattr(module, name).copy_(inv_freq)
    log.warning(event("rope.long_factors", context_tokens=context_tokens, original_window=original))
