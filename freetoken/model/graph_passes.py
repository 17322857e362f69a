"""What we change in the graph of a compiled decoder layer, before inductor makes kernels of it.

Products that are computed twice are computed once: JointLinear layers each compute the product of
them all. `aten.topk`, which calls a general selection, becomes our operator for the few best of a
router's few hundred scores, and so does the linear layer that makes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from freetoken.kernels import linear_ops
from freetoken.model import ops

aten = torch.ops.aten
# Of whose operators most depend on nothing but their arguments.
NAMESPACES = ("aten", "prims")
MAX_SCORES = 1024
MAX_TOP = 64


class LayerPasses(CustomGraphPass):
    """All of it; inductor's cache knows it by the contents of this file and of what it puts in."""

    def __call__(self, graph: fx.Graph) -> None:
        merge_repeated(graph)
        replace_topk(graph)
        replace_narrow_linears(graph)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, ops.__file__, linear_ops.__file__))

    def __eq__(self, other: object) -> bool:
        """torch.compile compares options to find compiled code again."""
        return isinstance(other, LayerPasses)

    def __hash__(self) -> int:
        return hash(LayerPasses)


def merge_repeated(graph: fx.Graph) -> None:
    """Let every pure operator with the same arguments as an earlier one take its result.

    All kinds of operators, as a product of one token has become a multiplication and a sum here.
    """
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if not _is_pure(node):
            continue
        key = (node.target, _freeze(node.args), _freeze(node.kwargs))
        try:
            first = seen.setdefault(key, node)
        except TypeError:
            continue  # a size that is no node of the graph
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def replace_topk(graph: fx.Graph) -> None:
    """Let our operator choose where the best of the last dimension are asked for."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten.topk.default and _is_routing(node):
            node.args = node.args[:2]
            node.kwargs = {}
            node.target = torch.ops.freetoken.top_k.default


def _is_routing(node: fx.Node) -> bool:
    names = ("self", "k", "dim", "largest", "sorted")
    arguments: dict[str, Any] = dict(zip(names, node.args, strict=False))
    arguments |= node.kwargs
    scores = arguments["self"].meta["val"]
    k, size = arguments["k"], scores.shape[-1]
    return (
        scores.dim() == 2
        and arguments.get("dim", -1) in (-1, 1)
        and bool(arguments.get("largest", True))
        and scores.dtype.is_floating_point
        and scores.dtype != torch.float64
        and isinstance(k, int)
        and isinstance(size, int)
        and k <= min(MAX_TOP, size)
        and size <= MAX_SCORES
    )


def replace_narrow_linears(graph: fx.Graph) -> None:
    """Let our operator compute x · weightᵀ (+ bias) with few outputs."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.kwargs:
            continue
        match node.target, node.args:
            case aten.mm.default, (x, transposed):
                bias = None
            case aten.addmm.default, (bias, x, transposed):
                pass
            case _:
                continue
        weight = _transposed(transposed)
        if weight is not None and _is_narrow(x, weight, bias):
            node.args = (x, weight, bias)
            node.target = torch.ops.freetoken.narrow_linear.default


def _transposed(node: fx.Node) -> fx.Node | None:
    """The matrix that this is the transpose of, if it is one."""
    match node.target, node.args:
        case (aten.t.default, (matrix,)) | (aten.permute.default, (matrix, [1, 0])):
            return matrix if isinstance(matrix, fx.Node) else None
    return None


def _is_narrow(x: fx.Node, weight: fx.Node, bias: fx.Node | None) -> bool:
    """Few outputs, and weights as layers have them, of one type with the tokens."""
    matrix, rows = weight.meta["val"], x.meta["val"]
    width = matrix.shape[0]
    return (
        isinstance(width, int)
        and width <= linear_ops.MAX_OUTPUTS
        and matrix.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and rows.dtype == matrix.dtype
        and matrix.stride(1) == rows.stride(1) == 1
        and (bias is None or bias.meta["val"].shape == (width,))
    )


def _is_pure(node: fx.Node) -> bool:
    target = node.target
    return (
        node.op == "call_function"
        and isinstance(target, torch._ops.OpOverload)
        and target.namespace in NAMESPACES
        and not target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in target.tags
    )


def _freeze(value: Any) -> Any:
    """Arguments as a key; symbolic sizes are nodes of the graph and stand for themselves.

    With types, as 1, 1.0 and True are equal, and different arguments.
    """
    if isinstance(value, dict):
        return tuple((name, _freeze(item)) for name, item in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(_freeze(item) for item in value)
    return type(value), value
