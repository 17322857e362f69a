"""A miniature of a model's config: few layers, small matrices, everything that matters kept.

Kept: one layer of each kind (as the layers of the full model differ), routing, rope and head size,
the ratio of heads where it is small, biases, norms, activation. Made small: hidden and feed-forward
sizes, vocabulary, windows (so that a short sequence reaches past them).
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from freetoken.model.build import build_meta_model
from freetoken.model.decoder import find_decoder_layers

VOCAB_SIZE = 128
HIDDEN_SIZE = 64
FFN_SIZE = 32
WINDOW = 8
MIN_LAYERS = 2
# Beyond this a copy of the model is not built, whatever its config says.
MAX_BYTES = 2 << 30
# Attributes of modules that number layers; they differ and mean nothing.
NUMBERING = ("layer_idx", "layer_id", "layer_number", "layer_index")


def miniatures(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Configs to try, smallest first; later ones shrink less, for models that cannot be shrunk.

    Each builds, has the kinds of layers that `config` has, and takes at most MAX_BYTES in fp32.
    """
    kinds = _layer_kinds(build_meta_model(deepcopy(config), torch.float32))
    for shrink in (_shrink_all, _shrink_proportionally, _shrink_vocabulary):
        for indices in _layer_choices(kinds):
            small = deepcopy(config)
            try:
                _take_layers(small, indices, len(kinds))
                shrink(small.get_text_config())
                model = build_meta_model(deepcopy(small), torch.float32)
            except Exception:
                # A config may refuse any change, with exceptions of its own.
                continue
            if _num_bytes(model) <= MAX_BYTES and _has_kinds(model, kinds):
                yield small
                break


def _layer_choices(kinds: list[Any]) -> Iterator[list[int]]:
    """Layers that show all kinds: the first of each kind, then the shortest prefix, then all."""
    firsts = sorted({kinds.index(kind) for kind in kinds})
    for extra in range(len(kinds)):
        if len(firsts) >= MIN_LAYERS:
            break
        firsts = sorted({*firsts, extra})
    yield firsts
    yield list(range(max(firsts) + 1))
    yield list(range(len(kinds)))


def _take_layers(config: PreTrainedConfig, indices: list[int], num_layers: int) -> None:
    text = config.get_text_config()
    text.num_hidden_layers = len(indices)
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == num_layers:
            setattr(text, name, [value[i] for i in indices])


def _layer_kinds(model: PreTrainedModel) -> list[Any]:
    """For each layer what it is made of: classes, shapes, and plain attributes of its modules."""
    return [_kind(layer, exact=True) for layer in find_decoder_layers(model)]


def _has_kinds(model: PreTrainedModel, kinds: list[Any]) -> bool:
    """Whether a shrunk model has layers of the same kinds, sizes aside."""
    loose = {_loosen(kind) for kind in kinds}
    return {_kind(layer, exact=False) for layer in find_decoder_layers(model)} == loose


def _kind(layer: nn.Module, *, exact: bool) -> Any:
    parts = []
    for name, module in layer.named_modules():
        attributes = tuple(
            (key, value if exact or isinstance(value, str | bool) else value is not None)
            for key, value in sorted(vars(module).items())
            if not key.startswith("_")
            and key not in NUMBERING
            and isinstance(value, int | float | str | bool | None)
        )
        parts.append((name, type(module).__name__, attributes))
    return tuple(parts)


def _loosen(kind: Any) -> Any:
    return tuple(
        (
            name,
            class_name,
            tuple(
                (key, value if isinstance(value, str | bool) else value is not None)
                for key, value in attributes
            ),
        )
        for name, class_name, attributes in kind
    )


def _num_bytes(model: nn.Module) -> int:
    return sum(parameter.numel() * 4 for parameter in model.parameters())


def _shrink_all(text: Any) -> None:
    """Hidden size independent of the heads, where the config says the head size."""
    if not _says_head_size(text):
        _shrink_proportionally(text)
        return
    _shrink_heads(text)
    _shrink_common(text)
    text.hidden_size = HIDDEN_SIZE


def _says_head_size(text: Any) -> bool:
    try:
        return getattr(text, "head_dim", None) is not None
    except Exception:
        # Head sizes that differ by layer: transformers raises when asked for the one.
        return True


def _shrink_proportionally(text: Any) -> None:
    """Hidden size of heads times head size: for configs where one follows from the other."""
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    _shrink_heads(text)
    _shrink_common(text)
    text.hidden_size = text.num_attention_heads * head_size


def _shrink_vocabulary(text: Any) -> None:
    _shrink_common(text)


def _shrink_heads(text: Any) -> None:
    kv_heads = getattr(text, "num_key_value_heads", None)
    heads = text.num_attention_heads
    if not isinstance(kv_heads, int) or heads % kv_heads:
        return
    text.num_key_value_heads = min(kv_heads, 2)
    text.num_attention_heads = text.num_key_value_heads * min(heads // kv_heads, 2)


def _shrink_common(text: Any) -> None:
    for name, value in list(vars(text).items()):
        if type(value) is not int:
            continue
        if "intermediate_size" in name or "ffn_hidden_size" in name:
            setattr(text, name, min(value, FFN_SIZE))
        elif "vocab_size" in name:
            setattr(text, name, VOCAB_SIZE)
        elif name in ("sliding_window", "attention_chunk_size"):
            setattr(text, name, min(value, WINDOW))
        elif name.endswith("_token_id"):
            setattr(text, name, min(value, VOCAB_SIZE - 1))
    text.vocab_size = VOCAB_SIZE
