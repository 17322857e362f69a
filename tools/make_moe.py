"""Writes a random Mixture-of-Experts checkpoint of any shape, for tests and benchmarks.

The files are those of a published checkpoint of the family: config, sharded safetensors in the
family's own key format, generation config, and a byte-level tokenizer (one token per byte) with a
chat template. One layer is in memory at a time. The same arguments give the same bytes.

    python tools/make_moe.py /data/moe --layers 16 --experts 128 --top-k 8 --hidden 2048 \
        --expert-hidden 768 --heads 32 --kv-heads 4 --head-dim 128 --vocab 151936
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from freetoken.model.build import build_meta_model
from freetoken.model.experts import experts_modules, num_experts, plan_layout
from freetoken.model.shape import measure_shape

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_BYTES = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
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
    total = _num_bytes(model)
    _check_directory(path, total)
    _write_tensors(path, model, shape.seed, max_shard_bytes, lambda done: progress(done, total))
    config.architectures = [type(model).__name__]
    config.save_pretrained(path)
    _write_tokenizer(path, shape)
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


def _num_bytes(model: PreTrainedModel) -> int:
    return sum(tensor.numel() * tensor.itemsize for _, tensor in _own_tensors(model))


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
    weight_map: dict[str, str] = {}
    files: list[Path] = []
    done = 0
    for tensors in _shards(model, seed, max_shard_bytes):
        file = path / f"shard-{len(files) + 1}.safetensors"
        files.append(file)
        save_file(tensors, file, metadata={"format": "pt"})
        file.chmod(0o644)
        weight_map |= dict.fromkeys(tensors, file.name)
        done += sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
        progress(done)
    final = {
        file.name: f"model-{i + 1:05}-of-{len(files):05}.safetensors"
        if len(files) > 1
        else "model.safetensors"
        for i, file in enumerate(files)
    }
    for file in files:
        file.rename(path / final[file.name])
    if len(files) > 1:
        index = {
            "metadata": {"total_size": done},
            "weight_map": {key: final[name] for key, name in weight_map.items()},
        }
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _shards(
    model: PreTrainedModel, seed: int, max_shard_bytes: int
) -> Iterator[dict[str, torch.Tensor]]:
    """The checkpoint's tensors under their published names, a shard at a time.

    A shard ends with the first layer that fills it, so it may exceed the limit by one layer.
    """
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for _, group in groupby(_own_tensors(model), key=lambda item: _layer_of(item[0])):
        tensors = {name: _random(name, like, seed) for name, like in group}
        published = revert_weight_conversion(model, tensors)
        del tensors
        for name, tensor in published.items():
            shard[name] = tensor.contiguous().clone()
            size += tensor.numel() * tensor.itemsize
        del published
        if size >= max_shard_bytes:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _layer_of(name: str) -> str:
    """`model.layers.3` of any tensor of that layer, else the tensor's own name."""
    before, found, after = name.partition(".layers.")
    return f"{before}{found}{after.partition('.')[0]}" if found else name


@torch.no_grad()
def _random(name: str, like: torch.Tensor, seed: int) -> torch.Tensor:
    """Random values of a size that keeps activations of order one; depends on name and seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ seed)
    tensor = torch.empty(like.shape, dtype=like.dtype)
    if like.dim() > 1:
        return tensor.normal_(std=1.6 * like.shape[-1] ** -0.5, generator=generator)
    if "norm" in name and name.endswith("weight"):
        return tensor.uniform_(0.8, 1.2, generator=generator)
    return tensor.uniform_(-0.1, 0.1, generator=generator)


def _write_tokenizer(path: Path, shape: MoeShape) -> None:
    """One token per byte; the rest of the vocabulary decodes to letters and is never encoded to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(alphabet) == NUM_BYTES
    vocab = {character: i for i, character in enumerate(alphabet)}
    first_filler = NUM_BYTES + len(SPECIAL_TOKENS)
    vocab |= {_letters(i - first_filler): i for i in range(first_filler, shape.vocab)}
    vocab |= {token: NUM_BYTES + i for i, token in enumerate(SPECIAL_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": shape.max_position,
            "eos_token": SPECIAL_TOKENS[2],
            "pad_token": SPECIAL_TOKENS[0],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    ends = [NUM_BYTES + 2, NUM_BYTES]
    _write_json(path / "generation_config.json", {"eos_token_id": ends, "pad_token_id": NUM_BYTES})


def _letters(number: int) -> str:
    """A different lower-case word of at least two letters for each number."""
    word = ""
    number += 26
    while number >= 0:
        word = chr(ord("a") + number % 26) + word
        number = number // 26 - 1
    return word


def _write_json(file: Path, data: dict[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=1) + "\n")


def _parse(arguments: list[str] | None) -> tuple[Path, MoeShape, int]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path, help="new or empty directory")
    for option in fields(MoeShape):
        if option.name == "overrides":
            continue
        kind = type(option.default)
        parser.add_argument(
            f"--{option.name.replace('_', '-')}",
            type=kind,
            default=option.default,
            help=f"default {option.default}",
        )
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
    path, shard_mib, settings = (
        options.pop("path"),
        options.pop("max_shard_mib"),
        options.pop("set"),
    )
    try:
        pairs = [setting.split("=", 1) for setting in settings]
        overrides = {name: json.loads(value) for name, value in pairs}
    except ValueError:
        parser.error(f"--set takes FIELD=JSON, not {settings}")
    return path, MoeShape(**options, overrides=overrides), shard_mib << 20


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
