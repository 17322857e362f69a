"""From a meta model and weights to a ServedModel: banks, dense parameters, faster CPU layers.

The loader and the self-check both build models here, so what is checked is what is served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from freetoken.errors import ConfigError, EngineError
from freetoken.experts.bank import ExpertBank, PackedBank, RowBank
from freetoken.experts.inplace import InPlaceExperts
from freetoken.experts.layout import ExpertLayout
from freetoken.experts.slots import SlotExperts, SlotPool
from freetoken.kernels.prepacked import can_prepack
from freetoken.kernels.reference import grouped_experts
from freetoken.model.attention import PagedAttention, attach_attention
from freetoken.model.conversion import BankTarget, bank_targets
from freetoken.model.experts import (
    attach_experts,
    experts_modules,
    gate_of,
    num_experts,
    plan_layout,
    post_norm_of,
)
from freetoken.model.layers import speed_up_for_cpu
from freetoken.model.passes import find_decoder_layers
from freetoken.model.rope import fix_rope
from freetoken.model.served import ServedModel
from freetoken.model.shape import ModelShape

ExpertsMode = Literal["in-place", "slots"]
MakeBank = Callable[[int, str, ExpertLayout, int], ExpertBank]
"""(index among the layers with experts, module name, layout, number of experts) → the bank."""


class Weights:
    """Takes weights by the model's tensor names; expert weights go to banks, the rest to `device`.

    The expert parameters of the model stay on meta.
    """

    def __init__(
        self, model: PreTrainedModel, experts: ExpertsMode, device: str, make_bank: MakeBank
    ) -> None:
        self.banks: dict[str, ExpertBank] = {}
        self._model = model
        self._device = device
        self._transposed: dict[str, bool] = {}
        self._targets: dict[str, BankTarget] = {}
        for layer, (name, module) in enumerate(experts_modules(model)):
            if experts == "in-place" and device != "cpu":
                raise EngineError(f"experts in place run on the CPU only, not on {device}")
            layout = plan_layout(name, module)
            self.banks[name] = make_bank(layer, name, layout, num_experts(module))
            self._transposed[name] = bool(module.is_transposed)
        self._targets = bank_targets(model)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Set a dense parameter or buffer to a copy of `tensor`."""
        path, _, leaf = name.rpartition(".")
        module = self._model.get_submodule(path)
        old = getattr(module, leaf)
        if tensor.shape != old.shape:
            raise ConfigError(
                f"{name} has shape {tuple(tensor.shape)} in the checkpoint, "
                f"{tuple(old.shape)} in {type(self._model).__name__} of this config"
            )
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device).copy_(tensor)
        if leaf in module._buffers:
            module._buffers[leaf] = value
        else:
            value = nn.Parameter(value, requires_grad=False)
            module._parameters[leaf] = value
        value._is_hf_initialized = True  # type: ignore[attr-defined]

    def put_expert(self, target: BankTarget, expert: int, tensor: torch.Tensor) -> None:
        """Copy one expert's part of an expert parameter, in the module's own orientation."""
        bank = self.banks[target.module_name]
        if self._transposed[target.module_name] and tensor.dim() == 2:
            tensor = tensor.t()
        expected = bank.layout.tensor(target.parameter_name).shape
        if tensor.shape != expected:
            raise ConfigError(
                f"{target.module_name}.{target.parameter_name} of expert {expert} has shape "
                f"{tuple(tensor.shape)} (out, in) in the checkpoint, the config says {expected}"
            )
        bank.put(expert, target.parameter_name, tensor)

    def put_whole(self, name: str, tensor: torch.Tensor) -> None:
        """Put a tensor of the model's own form: dense, or all experts of a layer."""
        target = self._targets.get(name)
        if target is None:
            self.put(name, tensor)
            return
        for expert in range(target.num_experts):
            self.put_expert(target, expert, tensor[expert])

    @torch.no_grad()
    def finish(self, missing: frozenset[str]) -> None:
        """Tie weights, compute non-persistent buffers; only experts may be left on meta."""
        model = self._model
        state = model.state_dict(keep_vars=True)
        for name in self._targets:
            state[name]._is_hf_initialized = True
        model.tie_weights(missing_keys=set(missing), recompute_mapping=False)
        for name, buffer in list(model.named_non_persistent_buffers()):
            path, _, leaf = name.rpartition(".")
            value = torch.empty_like(buffer, device=self._device)
            model.get_submodule(path)._buffers[leaf] = value
        model.initialize_weights()
        left = [
            name
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            if tensor.device.type == "meta" and name not in self._targets
        ]
        if left:
            raise EngineError(f"{type(model).__name__}: weights were never loaded: {left[:4]}")


def own_banks(experts: ExpertsMode) -> MakeBank:
    """Banks in memory of their own, in the form that `experts` computes from."""

    def make(layer: int, name: str, layout: ExpertLayout, num_experts: int) -> ExpertBank:
        if experts == "in-place" and can_prepack(layout.tensors[0].dtype):
            return PackedBank(layout, num_experts)
        return RowBank(layout, num_experts)

    return make


def assemble(
    model: PreTrainedModel,
    shape: ModelShape,
    weights: Weights,
    *,
    device: str,
    num_slots: int | None,
    context_tokens: int,
) -> ServedModel:
    """Put attention and experts in place; `weights` are finished.

    `num_slots`: of all layers together; None: experts are computed in place ·
    `context_tokens`: the longest request that will be served.
    """
    fix_rope(model, context_tokens)
    attention = PagedAttention()
    attach_attention(model, attention)
    modules = [(weights.banks[name], module) for name, module in experts_modules(model)]
    in_place: list[InPlaceExperts] = []
    pool = None
    if modules and num_slots is not None:
        pool = SlotPool(modules[0][0].layout, num_slots, shape.num_experts, device)
    for layer, (bank, module) in enumerate(modules):
        gate, norm = gate_of(module), post_norm_of(module)
        if pool is None:
            in_place.append(InPlaceExperts(bank, gate, norm))
            attach_experts(module, in_place[-1])
        else:
            assert isinstance(bank, RowBank), "slots are filled from rows"
            attach_experts(module, SlotExperts(layer, bank, pool, grouped_experts, gate, norm))
    memory = [piece for experts in in_place for piece in experts.bank.memory()]
    if device == "cpu":
        memory += speed_up_for_cpu(model, shape.dtype)
    model.requires_grad_(False)
    layers = find_decoder_layers(model)
    return ServedModel(model, shape, attention, layers, in_place, pool, memory)
