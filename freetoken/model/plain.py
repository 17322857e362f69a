"""Plain transformers: what the self-check compares with."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


def build_plain(config: PreTrainedConfig, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The model of `config` with transformers' own attention and experts."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        deepcopy(config),
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    nn.Module.to(model, device)
    model.eval()
    return model


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """ids: [L] → [L, V] float32 cpu, one row alone in one forward; ValueError for infinities."""
    ids = ids.to(model.device)
    logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0].float().cpu()
    if not bool(logits.isfinite().all()):
        raise ValueError("random weights give infinite logits")
    return logits


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights of a size at which every part of the model shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.empty(parameter.shape, dtype=parameter.dtype)
        if parameter.dim() > 1:
            values.normal_(std=1.6 * parameter.shape[-1] ** -0.5, generator=generator)
        elif "norm" in name and name.endswith("weight"):
            values.uniform_(0.5, 1.5, generator=generator)
        else:
            values.normal_(std=0.1, generator=generator)
        parameter.copy_(values)
    for name, buffer in model.named_buffers():
        if name.endswith("bias") and buffer.is_floating_point():
            values = torch.empty(buffer.shape, dtype=buffer.dtype)
            buffer.copy_(values.uniform_(-0.1, 0.1, generator=generator))
