"""Rotary embeddings whose frequencies depend on the longest position of a batch, made constant.

transformers recomputes them in the forward: one row would change its neighbours' logits, and keys
that are cached would disagree with later queries. Here the choice is made once, at load.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from freetoken.errors import EngineError
from freetoken.log import event, get

log = get(__name__)
CONSTANT = "default"


@torch.no_grad()
def fix_rope(model: nn.Module, context_tokens: int) -> None:
    """Fix the frequencies for requests of up to `context_tokens` tokens.

    dynamic: as they are up to max_position_embeddings; EngineError for longer contexts.
    longrope: the short factors if the context fits the original window, else the long ones for
    every request, which differs from transformers in requests shorter than that window.
    """
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str):
            _fix(module, rope_type, None, context_tokens)
            if _varies(rope_type):
                module.rope_type = CONSTANT  # type: ignore[assignment]
        elif isinstance(rope_type, dict):
            for layer_type, kind in rope_type.items():
                _fix(module, kind, layer_type, context_tokens)
            fixed = {key: CONSTANT if _varies(kind) else kind for key, kind in rope_type.items()}
            module.rope_type = fixed  # type: ignore[assignment]


def _varies(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


def _fix(module: nn.Module, rope_type: str, layer_type: str | None, context_tokens: int) -> None:
    config: Any = module.config
    if "dynamic" in rope_type and context_tokens > config.max_position_embeddings:
        raise EngineError(
            f"rope type {rope_type} cannot serve {context_tokens} tokens of context: its "
            f"frequencies would change beyond {config.max_position_embeddings}; lower "
            "--context-tokens"
        )
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
