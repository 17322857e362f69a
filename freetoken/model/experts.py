"""The one experts function: hands routed experts to the LayerExperts that hangs on the module.

Also reads the layout that an experts module of transformers declares. Supports every module under
`use_experts_implementation`: gated or not, biased or not, concatenated or interleaved, [out, in]
or transposed, with a norm after each expert or without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface

from freetoken.errors import EngineError
from freetoken.experts.layout import ExpertLayout
from freetoken.kernels.ops import Gate, PostNorm
from freetoken.model import ops

EXPERTS = "freetoken"
EXPERTS_ATTRIBUTE = "freetoken_experts"
SEAT_ATTRIBUTE = "freetoken_experts_seat"


class LayerExperts(Protocol):
    """Computes the routed experts of one layer: [T, C], ids [T, K], weights [T, K] → [T, C]."""

    def __call__(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor: ...


def register_experts() -> None:
    """Make EXPERTS known to transformers; may be called again."""
    ExpertsInterface.register(EXPERTS, experts_forward)


def experts_forward(
    module: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """hidden_states: [T, C], top_k_index, top_k_weights: [T, K] → [T, C]."""
    if torch.compiler.is_compiling():
        seat = getattr(module, SEAT_ATTRIBUTE)
        out = ops.experts(hidden_states, top_k_index, top_k_weights, seat)
        return cast(torch.Tensor, out)
    layer = cast(LayerExperts, getattr(module, EXPERTS_ATTRIBUTE))
    return layer(hidden_states, top_k_index, top_k_weights)


def attach_experts(
    module: nn.Module, layer: LayerExperts, seat: torch.Tensor | None = None
) -> None:
    """Let `layer` compute this module's experts. `seat`: see model/ops.py."""
    setattr(module, EXPERTS_ATTRIBUTE, layer)
    if seat is not None:
        setattr(module, SEAT_ATTRIBUTE, seat)


def is_experts_module(module: nn.Module) -> bool:
    """Whether transformers dispatches this module's forward through ExpertsInterface."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_concatenated")


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name, module) of every experts module, in order of layers."""
    for name, module in model.named_modules():
        if is_experts_module(module):
            yield name, module


def number_moe_layers(layers: Sequence[nn.Module]) -> list[int | None]:
    """For each decoder layer the number of its experts module among all, None if it has none."""
    counts = [sum(map(is_experts_module, layer.modules())) for layer in layers]
    assert max(counts) <= 1, "a decoder layer with several experts modules"
    return [sum(counts[:i]) if count else None for i, count in enumerate(counts)]


def bank_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that go to the bank, in row order: up, down, up bias, down bias."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    names = [up, "down_proj"]
    if module.has_bias:
        names += [f"{up}_bias", "down_proj_bias"]
    return {name: cast(nn.Parameter, getattr(module, name)) for name in names}


def num_experts(module: nn.Module) -> int:
    """E, from the shape of the weights."""
    return next(iter(bank_parameters(module).values())).shape[0]


def plan_layout(name: str, module: nn.Module) -> ExpertLayout:
    """The row of one expert of this module, matrices as [out, in]."""
    parameters = bank_parameters(module)
    dtypes = {parameter.dtype for parameter in parameters.values()}
    if len(dtypes) > 1:
        raise EngineError(f"{name}: expert weights of different types {sorted(map(str, dtypes))}")
    shapes = {key: tuple(parameter.shape[1:]) for key, parameter in parameters.items()}
    if module.is_transposed:
        shapes = {key: shape[::-1] for key, shape in shapes.items()}
    return ExpertLayout.plan(shapes, dtypes.pop())


def gate_of(module: nn.Module) -> Gate:
    """What comes between the two products: the module's gate, else its activation."""
    return cast(Gate, module._apply_gate if module.has_gate else module.act_fn)


def post_norm_of(module: nn.Module) -> PostNorm:
    """The norm after each expert, or None; transformers 5.17 does not know it."""
    if getattr(module, "has_post_expert_norm", False):
        return cast(PostNorm, module.post_expert_norm)
    return None
