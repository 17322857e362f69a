"""The list of decoder layers: finding it, and a second model object that runs other layers.

A model is never changed for a pass or for compiled layers: a copy of the few modules from the root
down to the list holds proxies of its layers, and shares everything else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from freetoken.errors import ConfigError


def find_decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The list of decoder layers; ConfigError if there is not exactly one."""
    return cast(nn.ModuleList, model.get_submodule(find_layers_name(model)))


def find_layers_name(model: PreTrainedModel) -> str:
    """The name of the list of decoder layers; ConfigError if there is not exactly one."""
    num_layers = model.config.get_text_config().num_hidden_layers
    found: list[str] = [
        name
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


def with_layers(
    model: PreTrainedModel,
    layers: Sequence[nn.Module],
    wrap: Callable[[nn.Module], nn.Module] | None = None,
) -> PreTrainedModel:
    """A model that shares all modules with `model` but runs `layers` as its decoder layers.

    `wrap`: what to put in place of the modules beside the layers, such as the last norm and the
    rotary embedding; not of embeddings.
    """
    path = find_layers_name(model).split(".")
    root = parent = _shallow(model)
    for name in path[:-1]:
        twin = _shallow(parent._modules[name])
        parent._modules[name] = twin
        parent = twin
    for name, child in parent._modules.items():
        if name == path[-1]:
            parent._modules[name] = nn.ModuleList(layers)
        elif wrap is not None and child is not None and _is_simple(child):
            parent._modules[name] = wrap(child)
    return cast(PreTrainedModel, root)


def _is_simple(module: nn.Module) -> bool:
    return not isinstance(module, nn.Embedding | nn.ModuleList)


def _shallow(module: nn.Module | None) -> nn.Module:
    """A copy whose children can be exchanged; parameters, buffers and children are shared."""
    assert module is not None
    twin = copy.copy(module)
    twin.__dict__["_modules"] = dict(module._modules)
    return twin


class LayerProxy(nn.Module):
    """Stands for a decoder layer; attributes that it does not have are the layer's."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_layer"), name)
