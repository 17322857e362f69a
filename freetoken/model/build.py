"""Builds transformers' model on the meta device with our two functions in place."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from freetoken.errors import ConfigError
from freetoken.model.attention import ATTENTION, register_attention
from freetoken.model.experts import EXPERTS, experts_modules, register_experts


def build_meta_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `config` without storage; modifies the config's implementation fields.

    Raises ConfigError if transformers has no causal language model for the config, or if it does
    not go through the attention interface.
    """
    register_attention()
    register_experts()
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation=ATTENTION,
                experts_implementation=EXPERTS,
            )
    except Exception as error:
        # transformers lists all classes that would do.
        reason = " ".join(str(error).split()).partition(" Model type should be one of")[0]
        raise ConfigError(f"cannot build model_type {config.model_type}: {reason}") from error
    model.eval()
    for _, module in experts_modules(model):
        if cast(Any, module.config)._experts_implementation != EXPERTS:
            raise ConfigError(f"{type(module).__name__} refuses the experts interface")
    return model
