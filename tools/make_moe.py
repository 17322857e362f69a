#!/usr/bin/env python3
"""Writes a random Mixture-of-Experts checkpoint of any shape, for tests and benchmarks.

The files are those of a published checkpoint of the family: config, sharded safetensors in the
family's own key format, generation config, and a byte-level tokenizer (one token per byte) with a
chat template. The same arguments give the same bytes.

    python tools/make_moe.py /data/moe --shape qwen3 --layers 4
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from byte_tokenizer import NUM_BYTES, SPECIAL_TOKENS, write_tokenizer
from random_weights import RandomWeights
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from freetoken.model.build import build_meta_model
from freetoken.model.experts import experts_modules, num_experts, plan_layout
from freetoken.model.shape import measure_shape

# What families call the same thing; every name that a config has is set.
EXPERT_COUNT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token")
MAX_SHARD_BYTES = 4 << 30
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class MoeShape:
    """What to make. `overrides` are further fields of the family's config."""

    layers: int = 2
    experts: int = 8
    top_k: int = 2
    hidden: int = 64
    expert_hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 512
    max_position: int = 32768
    dtype: str = "bfloat16"
    family: str = "qwen3_moe"
    seed: int = 0
    overrides: Mapping[str, Any] = field(default_factory=dict)


SHAPES = {
    "tiny": MoeShape(),
    # 16 of the 48 layers of Qwen3-30B-A3B: 19.3 GB of experts.
    "qwen3": MoeShape(
        layers=16,
        experts=128,
        top_k=8,
        hidden=2048,
        expert_hidden=768,
        heads=32,
        kv_heads=4,
        head_dim=128,
        vocab=151936,
        max_position=40960,
    ),
    # 12 of the 24 layers of gpt-oss-20b, not quantised: 19.1 GB of experts with biases, gate and up
    # interleaved, attention sinks, every other layer with a window of 128.
    "gpt-oss": MoeShape(
        family="gpt_oss",
        layers=12,
        experts=32,
        top_k=4,
        hidden=2880,
        expert_hidden=2880,
        heads=64,
        kv_heads=8,
        head_dim=64,
        vocab=201088,
        max_position=131072,
    ),
}
"""What `--shape` names; further options change it."""


def make_checkpoint(
    path: Path,
    shape: MoeShape,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Write the checkpoint into the new or empty directory `path`; returns it.

    `progress` gets bytes written and in all. Raises ValueError for a shape that the family cannot
    have, OSError when the directory is not empty or the disk is too small.
    """
    config = make_config(shape)
    model = build_meta_model(config, getattr(torch, shape.dtype))
    _check_shape(model, shape)
    total = _num_bytes(tensor for _, tensor in _own_tensors(model))
    _check_directory(path, total)
    _write_tensors(path, model, shape.seed, max_shard_bytes, lambda done: progress(done, total))
    config.architectures = [type(model).__name__]
    config.save_pretrained(path)
    write_tokenizer(path, vocab_size=shape.vocab, max_length=shape.max_position)
    return path


def make_config(shape: MoeShape) -> PreTrainedConfig:
    """The family's config with the sizes of `shape`."""
    known = AutoConfig.for_model(shape.family)
    has_own_ffn = hasattr(known, "moe_intermediate_size")
    values: dict[str, Any] = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_position,
        "intermediate_size": shape.expert_hidden * (shape.top_k if has_own_ffn else 1),
        "moe_intermediate_size": shape.expert_hidden,
        "pad_token_id": NUM_BYTES,
        "bos_token_id": None,
        "eos_token_id": NUM_BYTES + 2,
        "dtype": shape.dtype,
    }
    values |= dict.fromkeys(EXPERT_COUNT, shape.experts) | dict.fromkeys(TOP_K, shape.top_k)
    names = {*known.to_dict(), *known.attribute_map, "head_dim", "dtype"}
    values = {name: value for name, value in values.items() if name in names}
    # An alias and what it stands for must not both be given.
    aliases = {alias for alias, name in known.attribute_map.items() if name in values}
    values = {name: value for name, value in values.items() if name not in aliases}
    config = AutoConfig.for_model(shape.family, **values | dict(shape.overrides))
    assert isinstance(config, PreTrainedConfig)
    return config


def _check_shape(model: PreTrainedModel, shape: MoeShape) -> None:
    if shape.vocab < NUM_BYTES + len(SPECIAL_TOKENS):
        raise ValueError(
            f"vocab {shape.vocab} is too small: the tokenizer needs "
            f"{NUM_BYTES + len(SPECIAL_TOKENS)}"
        )
    measured = measure_shape(model)
    modules = list(experts_modules(model))
    if not modules:
        raise ValueError(f"{shape.family} of this shape has no experts")
    name, module = modules[0]
    down = plan_layout(name, module).tensors[1].shape
    wanted = (shape.experts, shape.top_k, shape.hidden, shape.expert_hidden)
    got = (num_experts(module), measured.top_k, *down)
    if got != wanted:
        raise ValueError(
            f"{shape.family} came out with (experts, top-k, hidden, expert hidden) = {got} instead "
            f"of {wanted}; set its own fields with --set"
        )


def _check_directory(path: Path, num_bytes: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise OSError(f"{path} is not empty")
    free = shutil.disk_usage(path).free
    if free < num_bytes * 1.02:
        raise OSError(f"{path} has {free >> 20} MiB free, the checkpoint takes {num_bytes >> 20}")


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _num_values(model: PreTrainedModel) -> int:
    return sum(tensor.numel() for _, tensor in _own_tensors(model))


def _own_tensors(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """(name, meta tensor) of what a checkpoint stores: tied tensors only once."""
    tied = model.all_tied_weights_keys
    return [(name, tensor) for name, tensor in model.state_dict().items() if name not in tied]


def _write_tensors(
    path: Path,
    model: PreTrainedModel,
    seed: int,
    max_shard_bytes: int,
    progress: Callable[[int], None],
) -> None:
    shards = list(_shards(model, max_shard_bytes))
    count = len(shards)
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    if count == 1:
        names = ["model.safetensors"]
    weights = RandomWeights(seed, _num_values(model))
    lock, done = Lock(), 0

    def report(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            progress(done)

    weight_map: dict[str, str] = {}
    for name, tensors in zip(names, shards, strict=True):
        weights.write(path / name, tensors, report)
        weight_map |= dict.fromkeys(tensors, name)
    if count > 1:
        index = {"metadata": {"total_size": done}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _shards(model: PreTrainedModel, max_shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """The checkpoint's tensors, on meta, under their published names, a shard at a time.

    A shard ends with the first layer that fills it, so it may exceed the limit by one layer.
    """
    shard: dict[str, torch.Tensor] = {}
    for _, group in groupby(_own_tensors(model), key=lambda item: _layer_of(item[0])):
        shard |= revert_weight_conversion(model, dict(group))
        if _num_bytes(shard.values()) >= max_shard_bytes:
            yield shard
            shard = {}
    if shard:
        yield shard


def _layer_of(name: str) -> str:
    """`model.layers.3` of any tensor of that layer, else the tensor's own name."""
    before, found, after = name.partition(".layers.")
    return f"{before}{found}{after.partition('.')[0]}" if found else name


def _parse(arguments: list[str] | None) -> tuple[Path, MoeShape, int]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path, help="new or empty directory")
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny", help="what to start from")
    for option in fields(MoeShape):
        if option.name == "overrides":
            continue
        flag = f"--{option.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(option.default), help="default: the shape's")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=JSON",
        help="another field of the family's config; may be repeated",
    )
    parser.add_argument(
        "--max-shard-mib", type=int, default=MAX_SHARD_BYTES >> 20, help="size of a shard"
    )
    options = vars(parser.parse_args(arguments))
    path, shard_mib, settings, shape = (
        options.pop(name) for name in ("path", "max_shard_mib", "set", "shape")
    )
    try:
        pairs = [setting.split("=", 1) for setting in settings]
        overrides = {name: json.loads(value) for name, value in pairs}
    except ValueError:
        parser.error(f"--set takes FIELD=JSON, not {settings}")
    given = {name: value for name, value in options.items() if value is not None}
    return path, replace(SHAPES[shape], **given, overrides=overrides), shard_mib << 20


def main(arguments: list[str] | None = None) -> int:
    path, shape, max_shard_bytes = _parse(arguments)

    def show(done: int, total: int) -> None:
        print(f"\r{done / 1e9:.2f} of {total / 1e9:.2f} GB", end="", file=sys.stderr, flush=True)

    try:
        make_checkpoint(path, shape, max_shard_bytes=max_shard_bytes, progress=show)
    except (ValueError, OSError) as error:
        print(f"make_moe: error: {error}", file=sys.stderr)
        return 1
    print(f"\n{path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
