"""make_gguf: the demo's experts and routers under llama.cpp's names, q and k in its order."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from make_gguf import write_gguf

from freetoken.demo.dense import DenseModel, unpermute
from freetoken.demo.recipe import Form, Recipe
from freetoken.demo.upcycle import checkpoint_tensors

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB = 576, 32, 9, 3, 64
"""The hidden size is that of the packaged routers; the rest is small."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A dense llama of one layer with random weights."""
    path = tmp_path / "source.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(128)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(0)
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    rng = np.random.default_rng(0)
    head = HIDDEN // HEADS
    shapes = {
        "token_embd": (VOCAB, HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HEADS * head, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * head, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * head, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HEADS * head),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_experts_and_routers_are_the_checkpoints(source: Path, tmp_path: Path) -> None:
    recipe = Recipe(form=Form.MIXTRAL)
    write_gguf(source, recipe, tmp_path / "moe.gguf")
    written = DenseModel(tmp_path / "moe.gguf")
    expected = dict(checkpoint_tensors(DenseModel(source), recipe))
    block = "model.layers.0.block_sparse_moe"
    for ours, theirs in {"w1": "gate", "w3": "up", "w2": "down"}.items():
        experts = [expected[f"{block}.experts.{e}.{ours}.weight"].float() for e in range(8)]
        stacked = torch.from_numpy(written.tensor(f"blk.0.ffn_{theirs}_exps.weight"))
        assert stacked.equal(torch.stack(experts))
    router = torch.from_numpy(written.tensor("blk.0.ffn_gate_inp.weight"))
    assert router.equal(expected[f"{block}.gate.weight"].float())
    assert written.fact("llama.expert_count") == 8
    assert written.fact("llama.expert_used_count") == 2
    assert written.fact("tokenizer.ggml.tokens") == [f"t{i}" for i in range(VOCAB)]
    assert written.fact("general.file_type") == gguf.LlamaFileType.MOSTLY_BF16


def test_q_and_k_stay_in_llama_cpps_order(source: Path, tmp_path: Path) -> None:
    recipe = Recipe(form=Form.MIXTRAL)
    write_gguf(source, recipe, tmp_path / "moe.gguf")
    written = DenseModel(tmp_path / "moe.gguf")
    expected = dict(checkpoint_tensors(DenseModel(source), recipe))
    for name, heads in {"q": HEADS, "k": KV_HEADS}.items():
        permuted = written.tensor(f"blk.0.attn_{name}.weight")
        ours = expected[f"model.layers.0.self_attn.{name}_proj.weight"].float().numpy()
        assert np.array_equal(unpermute(permuted, heads), ours)
        assert not np.array_equal(permuted, ours)


def test_norms_and_routers_are_f32_the_rest_bf16(source: Path, tmp_path: Path) -> None:
    write_gguf(source, Recipe(form=Form.MIXTRAL), tmp_path / "moe.gguf")
    types = {
        tensor.name: tensor.tensor_type.name
        for tensor in gguf.GGUFReader(tmp_path / "moe.gguf").tensors
    }
    small = {name for name, kind in types.items() if kind == "F32"}
    norms = {"blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"}
    assert small == norms | {"blk.0.ffn_gate_inp.weight"}
    assert set(types.values()) == {"F32", "BF16"}
