"""From a meta model and weights to a ServedModel: banks, dense parameters, faster CPU layers.

The loader and the self-check both build models here, so what is checked is what is served.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from freetoken.errors import ConfigError, EngineError
from freetoken.experts.bank import ExpertBank, PackedBank, RowBank
from freetoken.experts.inplace import InPlaceExperts
from freetoken.experts.layout import ExpertLayout
from freetoken.experts.slots import SlotExperts, SlotPool
from freetoken.experts.stream import PassRing
from freetoken.kernels.gates import recognise_gate
from freetoken.kernels.prepacked import can_prepack
from freetoken.model.attention import (
    PagedAttention,
    StepAttention,
    attach_attention,
    attend_for,
)
from freetoken.model.conversion import BankTarget, bank_targets
from freetoken.model.device_attention import DeviceAttention
from freetoken.model.experts import (
    LayerExperts,
    attach_experts,
    experts_modules,
    gate_of,
    num_experts,
    plan_layout,
    post_norm_of,
)
from freetoken.model.joint import join_linears
from freetoken.model.layers import speed_up_for_cpu
from freetoken.model.ops import Callees, seat_callees
from freetoken.model.rope import fix_rope
from freetoken.model.served import ServedModel, SlotCache
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
    overlap_passes: bool = True,
    use_kernels: bool | None = None,
) -> ServedModel:
    """Put attention and experts in place; `weights` are finished.

    `num_slots`: of all layers together; None: experts are computed in place ·
    `context_tokens`: the longest request that will be served · `overlap_passes`: copy a layer's
    experts while the layer before computes · `use_kernels`: attention through the kernels'
    interface, as on a GPU, where it is the default.
    """
    on_cpu = device == "cpu"
    fix_rope(model, context_tokens)
    attention: StepAttention
    attention = DeviceAttention() if (use_kernels or not on_cpu) else PagedAttention()
    modules = [module for _, module in experts_modules(model)]
    banks = [weights.banks[name] for name, _ in experts_modules(model)]
    in_place: list[InPlaceExperts] = []
    slots: SlotCache | None = None
    if num_slots is None or not modules:
        in_place = [_in_place(bank, module) for bank, module in zip(banks, modules, strict=True)]
    else:
        slots = make_slots(banks, num_slots, device, overlap_passes)
    routes: Sequence[LayerExperts] = in_place
    if slots is not None:
        routes = [_slot_experts(i, module, slots) for i, module in enumerate(modules)]
    callees = Callees(attend_for(attention), routes)
    make_seat = seat_callees(callees)
    attach_attention(model, attention, make_seat)
    for layer, module in enumerate(modules):
        attach_experts(module, routes[layer], make_seat(layer))
    memory = [piece for experts in in_place for piece in experts.bank.memory()]
    if on_cpu:
        memory += speed_up_for_cpu(model, shape.dtype)
    else:
        join_linears(model)
        torch.cuda.empty_cache()  # the weights that were joined
    model.requires_grad_(False)
    return ServedModel(model, shape, attention, callees, in_place, slots, memory)


def make_slots(
    banks: Sequence[ExpertBank], num_slots: int, device: str, overlap_passes: bool
) -> SlotCache:
    """Empty slots and the ring for passes."""
    rows = [bank for bank in banks if isinstance(bank, RowBank)]
    assert len(rows) == len(banks), "slots are filled from rows"
    pool = SlotPool(rows, num_slots, device)
    ring = PassRing(rows, pool.rows, pool.tables.slot_of, overlaps=overlap_passes)
    return SlotCache(pool, ring)


def _in_place(bank: ExpertBank, module: nn.Module) -> InPlaceExperts:
    return InPlaceExperts(bank, gate_of(module), post_norm_of(module))


def _slot_experts(layer: int, module: nn.Module, slots: SlotCache) -> SlotExperts:
    gate, layout = gate_of(module), slots.pool.layout
    up = layout.tensor(layout.up)
    kind = recognise_gate(gate, bool(module.has_gate), up.shape[0], up.dtype)
    return SlotExperts(layer, slots.pool, slots.ring, kind or gate, post_norm_of(module))
