"""Loading: what must be the same as transformers' own loader, and every way a directory is bad."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from freetoken.errors import ConfigError, EngineError
from freetoken.model.load import load_model, read_shape
from freetoken.model.served import ServedModel
from freetoken.model.trial import Part, Trial
from tests.model import tiny

LENGTH = 9


def load(path: Path, dtype: str = "auto", **options: Any) -> ServedModel:
    defaults: dict[str, Any] = {
        "device": "cpu",
        "experts": "in-place",
        "num_slots": None,
        "progress": lambda phase, done, total: None,
    }
    return load_model(path, dtype=dtype, **defaults | options)


def checkpoint(path: Path, family: str = "qwen3_moe", **save: Any) -> Path:
    return tiny.save(tiny.make_model(tiny.make_config(family)), path, **save)


def logits(model: ServedModel, ids: torch.Tensor) -> torch.Tensor:
    trial = Trial(model, [ids])
    trial.step(Part(0, len(ids)))
    return trial.logits(0)


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite a checkpoint of one shard."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


@pytest.fixture
def one_shard(tmp_path: Path) -> Path:
    return checkpoint(tmp_path, max_shard_size="1GB")


# ---- what is loaded


def test_experts_whose_tensors_lie_in_different_shards_are_loaded(tmp_path: Path) -> None:
    plain = tiny.make_model(tiny.make_config("qwen3_moe"))
    tiny.save(plain, tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    prefix = "model.layers.1.mlp.experts."
    split = [
        e
        for e in range(8)
        if index[f"{prefix}{e}.gate_proj.weight"] != index[f"{prefix}{e}.up_proj.weight"]
    ]
    assert split, "this checkpoint does not test what it should"
    ids = tiny.random_ids(LENGTH, 0)
    assert tiny.relative_error(logits(load(tmp_path), ids), tiny.plain_logits(plain, ids)) < 1e-4


@pytest.mark.parametrize(
    "family", ["qwen3_moe-dense-layer", "qwen3_moe", "ernie4_5_moe", "gpt_oss"]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dense_weights_have_the_types_and_values_that_transformers_gives_them(
    tmp_path: Path, family: str, dtype: str
) -> None:
    checkpoint(tmp_path, family)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    ours = load(tmp_path, dtype)._model
    loaded = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    compared = 0
    for name, expected in [*reference.named_parameters(), *reference.named_buffers()]:
        got = loaded.get(name)
        # Packed and fused layers keep no plain parameter; experts are in banks.
        if got is not None and got.device.type != "meta":
            assert got.dtype == expected.dtype, name
            assert torch.equal(got, expected), name
            compared += 1
    assert compared >= 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close_to_fp32(tmp_path: Path, dtype: str) -> None:
    plain = tiny.make_model(tiny.make_config("qwen3"))
    tiny.save(plain, tmp_path)
    ids = tiny.random_ids(LENGTH, 0)
    error = tiny.relative_error(logits(load(tmp_path, dtype), ids), tiny.plain_logits(plain, ids))
    # Three layers of roundings of 2^-9; a wrong weight gives about 1.
    assert 1e-5 < error < 5e-2


def test_tied_head_is_the_embedding(tmp_path: Path) -> None:
    checkpoint(tmp_path, "qwen3_moe-dense-layer")
    with safe_open(next(tmp_path.glob("*.safetensors")), "pt") as shard:
        assert "lm_head.weight" not in shard.keys()  # noqa: SIM118
    model = load(tmp_path)._model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert read_shape(tmp_path, "auto").tied_head_bytes == tiny.VOCAB * 64 * 4


def test_checkpoint_with_only_the_head_of_a_tied_pair_loads(tmp_path: Path) -> None:
    plain = tiny.make_model(tiny.make_config("qwen3_moe-dense-layer"))
    tiny.save(plain, tmp_path, max_shard_size="1GB")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    edit_tensors(tmp_path, rename)
    ids = tiny.random_ids(LENGTH, 0)
    assert tiny.relative_error(logits(load(tmp_path), ids), tiny.plain_logits(plain, ids)) < 1e-4


def test_auto_dtype_is_the_config_s_else_the_tensors_own(one_shard: Path) -> None:
    edit_config(one_shard, dtype="bfloat16")
    assert read_shape(one_shard, "auto").dtype == torch.bfloat16
    assert read_shape(one_shard, "float32").dtype == torch.float32
    edit_config(one_shard, dtype=None)
    assert read_shape(one_shard, "auto").dtype == torch.float32


def test_progress_counts_the_bytes_of_the_checkpoint(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    seen: list[tuple[str, int, int]] = []
    load(tmp_path, progress=lambda *call: seen.append(call))
    total = sum(
        t.numel() * t.itemsize
        for f in tmp_path.glob("*.safetensors")
        for t in load_file(f).values()
    )
    assert seen[0] == ("loading", 0, total)
    assert seen[-1] == ("loading", total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert len(seen) > 10


# ---- shapes


def test_shape_is_read_from_the_config_alone(tmp_path: Path) -> None:
    tiny.make_config("glm4_moe").save_pretrained(tmp_path)
    edit_config(tmp_path, dtype="bfloat16")
    shape = read_shape(tmp_path, "auto")
    assert (shape.class_name, shape.model_type) == ("Glm4MoeForCausalLM", "glm4_moe")
    assert (shape.num_layers, shape.num_moe_layers) == (3, 2)
    assert (shape.num_experts, shape.top_k) == (8, 2)
    assert shape.expert_bytes == 3 * 32 * 64 * 2
    assert shape.bank_bytes == 2 * 8 * shape.expert_bytes
    assert [(kv.num_kv_heads, kv.k_dim, kv.v_dim) for kv in shape.kv] == [(2, 16, 16)] * 3
    assert shape.kv[0].token_bytes(shape.dtype) == 2 * 32 * 2
    assert (shape.vocab_size, shape.hidden_size, shape.window) == (tiny.VOCAB, 64, 256)


def test_dense_bytes_and_bank_bytes_are_all_there_is(one_shard: Path) -> None:
    shape = read_shape(one_shard, "float32")
    stored = sum(t.numel() * 4 for t in load_file(one_shard / "model.safetensors").values())
    # Beside the checkpoint's tensors there are the rotary frequencies, twice; rows have no padding.
    assert shape.dense_bytes + shape.bank_bytes == stored + 2 * 8 * 4


def test_dense_model_has_no_experts(tmp_path: Path) -> None:
    tiny.make_config("llama").save_pretrained(tmp_path)
    shape = read_shape(tmp_path, "float32")
    assert (shape.num_moe_layers, shape.num_experts, shape.top_k, shape.bank_bytes) == (0, 0, 0, 0)


def test_k_and_v_of_different_sizes_are_told_apart(tmp_path: Path) -> None:
    config = tiny.make_config("qwen3")
    deepseek = {
        "model_type": "deepseek_v3",
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "moe_intermediate_size": 32,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | deepseek))
    shape = read_shape(tmp_path, "float32")
    assert [(kv.num_kv_heads, kv.k_dim, kv.v_dim) for kv in shape.kv] == [(4, 24, 12)] * 3


# ---- directories that cannot be served


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a directory"):
        read_shape(tmp_path / "nowhere", "auto")


def test_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        read_shape(tmp_path, "auto")


def test_broken_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        read_shape(tmp_path, "auto")


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "never_heard_of"}')
    with pytest.raises(ConfigError, match="never_heard_of"):
        read_shape(tmp_path, "auto")


def test_model_that_generates_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit", "dtype": "float32"}')
    with pytest.raises(ConfigError, match="vit") as refused:
        read_shape(tmp_path, "auto")
    assert "LlamaConfig" not in str(refused.value), "hundreds of classes that would do"


@pytest.mark.parametrize(
    ("quantization", "named"),
    [
        ({"quant_method": "fp8", "fmt": "e4m3"}, "quant_method fp8, format e4m3"),
        ({"quant_method": "mxfp4"}, "quant_method mxfp4"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "quant_method compressed-tensors, format pack-quantized",
        ),
    ],
)
def test_quantised_checkpoint_is_refused_by_method_and_format(
    one_shard: Path, quantization: dict[str, Any], named: str
) -> None:
    edit_config(one_shard, quantization_config=quantization)
    with pytest.raises(ConfigError, match=named):
        load(one_shard)


def test_quantisation_beside_the_config_is_refused(one_shard: Path) -> None:
    (one_shard / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(ConfigError, match="NVFP4"):
        load(one_shard)


def test_tensor_stored_in_an_unsupported_type_is_refused(one_shard: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.mlp.experts.3.up_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    edit_tensors(one_shard, edit)
    with pytest.raises(ConfigError, match=r"experts\.3\.up_proj\.weight .* stored as F8_E4M3"):
        load(one_shard)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[2]
    shard.unlink()
    with pytest.raises(ConfigError, match=f"1 of .* shards are missing .*{shard.name}"):
        load(tmp_path)


def test_truncated_shard_is_named_with_its_sizes(one_shard: Path) -> None:
    shard = one_shard / "model.safetensors"
    size = shard.stat().st_size
    with shard.open("r+b") as stream:
        stream.truncate(size - 100)
    with pytest.raises(ConfigError, match=rf"truncated: {size - 100} of {size} bytes"):
        load(one_shard)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, b"\x10" + b"\0" * 7 + b"not json"])
def test_damaged_shard_is_named(one_shard: Path, content: bytes) -> None:
    (one_shard / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a safetensors file"):
        load(one_shard)


@pytest.mark.parametrize("header", ["[]", '{"a": 1}', '{"a": {}}'])
def test_a_shard_whose_header_is_no_table_of_tensors_is_named(one_shard: Path, header: str) -> None:
    content = len(header).to_bytes(8, "little") + header.encode()
    (one_shard / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a safetensors file"):
        load(one_shard)


def test_a_shard_whose_sizes_contradict_each_other_is_named(one_shard: Path) -> None:
    shard = one_shard / "model.safetensors"
    content = shard.read_bytes()
    first = content.index(b'"data_offsets":[0,') + len(b'"data_offsets":[')
    shard.write_bytes(content[:first] + b"4" + content[first + 1 :])
    with pytest.raises(ConfigError, match=r"cannot read shard .*model\.safetensors"):
        load(one_shard)


def test_directory_without_weights_is_refused(tmp_path: Path) -> None:
    tiny.make_config("qwen3").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.layers.1.mlp.experts.5.up_proj.weight", r"up_proj.*experts\.gate_up_proj\[5\]"),
        ("model.layers.1.mlp.experts.5.down_proj.weight", r"experts\.down_proj\[5\]"),
    ],
)
def test_missing_tensor_is_named(one_shard: Path, name: str, shown: str) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    edit_tensors(one_shard, edit)
    with pytest.raises(ConfigError, match=f"lacks 1 tensors of Qwen3MoeForCausalLM: .*{shown}"):
        load(one_shard)


def test_unexpected_tensor_is_named(one_shard: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.7.self_attn.q_proj.weight"] = torch.zeros(2)

    edit_tensors(one_shard, edit)
    with pytest.raises(ConfigError, match=r"does not know: model\.layers\.7\.self_attn"):
        load(one_shard)


def test_stored_rotary_frequencies_are_ignored(one_shard: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    edit_tensors(one_shard, edit)
    load(one_shard)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.norm.weight", (63,)),
        ("model.layers.0.mlp.experts.2.down_proj.weight", (64, 31)),
    ],
)
def test_tensor_of_another_shape_is_named(
    one_shard: Path, name: str, shape: tuple[int, ...]
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.zeros(shape)

    edit_tensors(one_shard, edit)
    with pytest.raises(ConfigError, match=rf"shape \({', '.join(map(str, shape))}"):
        load(one_shard)


def test_expert_beyond_the_config_s_number_is_refused(one_shard: Path) -> None:
    edit_config(one_shard, num_experts=4, num_local_experts=4)
    with pytest.raises(ConfigError, match="is of expert 4, the config has 4 experts"):
        load(one_shard)


def test_slots_need_a_number_of_slots(one_shard: Path) -> None:
    with pytest.raises(EngineError, match="slots need a number"):
        load(one_shard, experts="slots")
    with pytest.raises(EngineError, match="slots need a number"):
        load(one_shard, num_slots=3)


def test_loaded_model_keeps_no_expert_weights_but_the_bank(one_shard: Path) -> None:
    model: PreTrainedModel = load(one_shard)._model
    experts = [(n, p) for n, p in model.named_parameters() if ".experts." in n]
    assert len(experts) == 6
    assert all(parameter.device.type == "meta" for _, parameter in experts)
    others = [(n, p) for n, p in model.named_parameters() if ".experts." not in n]
    assert all(parameter.device.type == "cpu" for _, parameter in others)
