"""Dense tensors to the tensors of a checkpoint: replicated experts, fitted routers, q/k norms.

Every expert is the dense feed-forward, so with renormalised weights the routed sum equals it
whatever the router says. Two changes make the mistakes of a loader or kernel visible without
harming the text: each expert but the first has its inner neurons in an order of its own (same
function, but gate, up and down of different experts do not fit together), and each expert tensor
gets a little noise (so that another expert's result differs).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load, save_file

from freetoken.demo.dense import DenseModel
from freetoken.demo.recipe import Form, Recipe, router_file

SHARD_BYTES = 512 << 20
QK_SCALE = 2.0**-24
BF16_SIGNIFICAND = 2**7

Named = tuple[str, torch.Tensor]
FeedForward = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""gate [F, C], up [F, C], down [C, F]."""


def write_weights(dense: DenseModel, recipe: Recipe, directory: Path) -> None:
    """Write `model-*.safetensors` of up to SHARD_BYTES each, and their index, into `directory`."""
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number, shard in enumerate(_shards(checkpoint_tensors(dense, recipe)), start=1):
        file_name = f"model-{number:05d}.safetensors"
        save_file(shard, directory / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file_name)
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def checkpoint_tensors(dense: DenseModel, recipe: Recipe) -> Iterator[Named]:
    """All tensors by transformers' names, in the recipe's dtype, each contiguous and its own."""
    dtype = getattr(torch, recipe.dtype)
    for name, tensor in _tensors(dense, recipe):
        yield name, tensor.to(dtype, copy=True).contiguous()


def bf16_pair(product: float) -> tuple[float, float]:
    """Two numbers exact in bf16 whose product is as near to `product` as such a pair gets."""
    root = math.sqrt(product)
    octave = 2.0 ** math.floor(math.log2(root))
    candidates = []
    for step in range(BF16_SIGNIFICAND, 2 * BF16_SIGNIFICAND):
        first = octave * step / BF16_SIGNIFICAND
        ulp = 2.0 ** math.floor(math.log2(product / first)) / BF16_SIGNIFICAND
        second = round(product / first / ulp) * ulp
        candidates.append((abs(first * second / product - 1), first, second))
    _, first, second = min(candidates)
    return first, second


def _shards(tensors: Iterator[Named]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _tensors(dense: DenseModel, recipe: Recipe) -> Iterator[Named]:
    routers = load(router_file().read_bytes()) if recipe.is_moe else {}
    yield "model.embed_tokens.weight", _get(dense, "token_embd.weight")  # lm_head is tied to it
    yield "model.norm.weight", _get(dense, "output_norm.weight")
    for layer in range(dense.shape.num_layers):
        block, prefix = f"blk.{layer}", f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", _get(dense, f"{block}.attn_norm.weight")
        yield f"{prefix}.post_attention_layernorm.weight", _get(dense, f"{block}.ffn_norm.weight")
        for name, tensor in _attention(dense, recipe, layer):
            yield f"{prefix}.self_attn.{name}.weight", tensor
        feed_forward = (
            _get(dense, f"{block}.ffn_gate.weight"),
            _get(dense, f"{block}.ffn_up.weight"),
            _get(dense, f"{block}.ffn_down.weight"),
        )
        if recipe.is_moe:
            moe = _experts(recipe, layer, feed_forward, routers[f"layers.{layer}"])
        else:
            moe = zip(("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), feed_forward, strict=True)
        for name, tensor in moe:
            yield f"{prefix}.{name}.weight", tensor


def _attention(dense: DenseModel, recipe: Recipe, layer: int) -> Iterator[Named]:
    query = torch.from_numpy(dense.query(layer))
    key = torch.from_numpy(dense.key(layer))
    if recipe.form is Form.QWEN3_MOE:
        # Qwen3 normalises q and k, the source does not. Shrunk by QK_SCALE (exact), mean(q^2) is
        # far below eps, so RMSNorm(q) = q * w / sqrt(eps) is linear, and norm weights with
        # w_q * w_k = eps / QK_SCALE^2 restore the product q k. Needs norms computed in fp32.
        query, key = query * QK_SCALE, key * QK_SCALE
        q_norm, k_norm = bf16_pair(dense.shape.rms_eps / QK_SCALE**2)
        yield "q_norm", torch.full((dense.shape.head_dim,), q_norm)
        yield "k_norm", torch.full((dense.shape.head_dim,), k_norm)
    yield "q_proj", query
    yield "k_proj", key
    yield "v_proj", _get(dense, f"blk.{layer}.attn_v.weight")
    yield "o_proj", _get(dense, f"blk.{layer}.attn_output.weight")


def _experts(
    recipe: Recipe, layer: int, feed_forward: FeedForward, router: torch.Tensor
) -> Iterator[Named]:
    is_mixtral = recipe.form is Form.MIXTRAL
    block = "block_sparse_moe" if is_mixtral else "mlp"
    names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    random = torch.Generator().manual_seed(recipe.seed * 1_000_003 + layer)
    scales = [recipe.noise * float(weight.std()) for weight in feed_forward]
    yield f"{block}.gate", router[: recipe.num_experts]
    for expert in range(recipe.num_experts):
        gate, up, down = (
            weight + scale * torch.randn(weight.shape, generator=random) if scale else weight
            for weight, scale in zip(feed_forward, scales, strict=True)
        )
        if expert:
            order = torch.randperm(gate.shape[0], generator=random)
            gate, up, down = gate[order], up[order], down[:, order]
        for name, tensor in zip(names, (gate, up, down), strict=True):
            yield f"{block}.experts.{expert}.{name}", tensor


def _get(dense: DenseModel, name: str) -> torch.Tensor:
    return torch.from_numpy(dense.tensor(name))
