"""Attention and experts as torch operators, which compiled layers call as they are.

torch.compile traces a decoder layer into one graph; what we compute ourselves must not be looked
into: it has state (pages, slots) and kernels of its own. An operator takes tensors and numbers
only, so a module carries its *seat*, a tensor [2] int64 on the CPU: the number of the model's
Callees and the layer. As a tensor it is an input of the graph, which therefore serves every layer;
a Python number would be compiled in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from freetoken.kernels.linear_ops import narrow_linear
from freetoken.kernels.sample_ops import top_k

Attend = Callable[
    [
        int,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        float | None,
        float | None,
        torch.Tensor | None,
        int | None,
    ],
    torch.Tensor,
]
Route = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False, weakref_slot=True, slots=True)
class Callees:
    """What the operators of one model call.

    attend: (layer_idx, query, key, value, scaling, softcap, sinks, window), see LayerAttention ·
    routes: by number of the experts module, see LayerExperts.
    """

    attend: Attend
    routes: Sequence[Route]


_numbers = itertools.count()
# Operators are functions of the process, so what they find by number is the process's as well.
_callees: WeakValueDictionary[int, Callees] = WeakValueDictionary()


def seat_callees(callees: Callees) -> Callable[[int], torch.Tensor]:
    """Makes the seats of a model's layers. The caller keeps `callees`, here they are not kept."""
    number = next(_numbers)
    _callees[number] = callees
    return lambda layer: torch.tensor([number, layer])


@torch.library.custom_op("freetoken::attention", mutates_args=())
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    seat: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    window: int | None,
) -> torch.Tensor:
    """query: [1, H, T, Dk], key: [1, G, T, Dk], value: [1, G, T, Dv] → [1, T, H, Dv]."""
    number, layer = map(int, seat.tolist())
    attend = _callees[number].attend
    out = attend(layer, query, key, value, scaling, softcap, sinks, window)
    return out.contiguous()


@attention.register_fake
def _fake_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    seat: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    window: int | None,
) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


@torch.library.custom_op("freetoken::experts", mutates_args=())
def experts(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, seat: torch.Tensor
) -> torch.Tensor:
    """hidden: [T, C], ids and weights: [T, K] → [T, C]."""
    number, layer = map(int, seat.tolist())
    out = _callees[number].routes[layer](hidden, ids, weights)
    return out.contiguous()


@experts.register_fake
def _fake_experts(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, seat: torch.Tensor
) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


@torch.library.custom_op("freetoken::top_k", mutates_args=())
def select_top(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """scores: [T, E] → values [T, k] of the same type, ids [T, k] int64, best first."""
    values, ids = top_k(scores, k)
    return values.contiguous(), ids.contiguous()


@select_top.register_fake
def _fake_top(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*scores.shape[:-1], k)
    return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("freetoken::narrow_linear", mutates_args=())
def multiply_narrow(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """x: [T, C], weight: [N, C], bias: [N] → [T, N]."""
    return narrow_linear(x, weight, bias)


@multiply_narrow.register_fake
def _fake_narrow(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])
