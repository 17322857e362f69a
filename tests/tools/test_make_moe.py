from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from freetoken.model.load import load_model, read_shape
from freetoken.model.trial import Part, Trial
from tools.make_moe import MoeShape, main, make_checkpoint

PUBLISHED_KEYS = {
    "qwen3_moe": "model.layers.1.mlp.experts.7.gate_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.7.w1.weight",
    "gpt_oss": "model.layers.1.mlp.experts.gate_up_proj_bias",
    "granitemoe": "model.layers.1.block_sparse_moe.input_linear.weight",
    "olmoe": "model.layers.1.mlp.experts.7.down_proj.weight",
    "glm4_moe": "model.layers.1.mlp.experts.7.up_proj.weight",
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "glm4_moe": {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "granitemoe": {},
}


def keys(path: Path) -> set[str]:
    found: set[str] = set()
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            found |= set(shard.keys())
    return found


@pytest.mark.parametrize("family", list(PUBLISHED_KEYS))
def test_checkpoint_has_the_published_keys_and_loads_here_and_in_transformers(
    tmp_path: Path, family: str
) -> None:
    head_dim = {"granitemoe": 16, "olmoe": 16}.get(family, 32)
    shape = MoeShape(
        family=family,
        dtype="float32",
        head_dim=head_dim,
        overrides=OVERRIDES.get(family, {}),
    )
    make_checkpoint(tmp_path, shape)
    assert PUBLISHED_KEYS[family] in keys(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ours = load_model(
        tmp_path,
        dtype="auto",
        device="cpu",
        experts="in-place",
        num_slots=None,
        progress=lambda phase, done, total: None,
    )
    ids = torch.arange(12)
    trial = Trial(ours, [ids])
    trial.step(Part(0, 12))
    with torch.no_grad():
        expected = plain(input_ids=ids[None], use_cache=False).logits[0]
    assert float((trial.logits(0) - expected).norm() / expected.norm()) < 1e-4
    assert float(expected.std()) > 0.1


def test_shape_is_what_was_asked_for(tmp_path: Path) -> None:
    shape = MoeShape(
        layers=3, experts=5, top_k=3, hidden=48, expert_hidden=24, heads=6, kv_heads=3, vocab=300
    )
    make_checkpoint(tmp_path, shape)
    got = read_shape(tmp_path, "auto")
    assert (got.num_layers, got.num_moe_layers, got.num_experts, got.top_k) == (3, 3, 5, 3)
    assert (got.hidden_size, got.vocab_size, got.window) == (48, 300, 32768)
    assert (got.kv[0].num_kv_heads, got.kv[0].k_dim, got.dtype) == (3, 16, torch.bfloat16)


def test_same_arguments_give_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    files = [
        (make_checkpoint(tmp_path / name, MoeShape(seed=seed)) / "model.safetensors").read_bytes()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert files[0] == files[1] != files[2]


def test_weights_do_not_depend_on_the_size_of_shards(tmp_path: Path) -> None:
    one = make_checkpoint(tmp_path / "one", MoeShape())
    many = make_checkpoint(tmp_path / "many", MoeShape(), max_shard_bytes=100_000)
    assert len(list(many.glob("model-*-of-*.safetensors"))) > 2
    assert keys(one) == keys(many)
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (one, many)]
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@torch.inference_mode()
def test_tokens_are_routed_to_different_experts(tmp_path: Path) -> None:
    shape = MoeShape(layers=6, experts=16, top_k=2, hidden=128, expert_hidden=64, head_dim=32)
    model = AutoModelForCausalLM.from_pretrained(make_checkpoint(tmp_path, shape))
    chosen: list[torch.Tensor] = []
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(lambda module, given, output: chosen.append(output[2]))
    model(torch.arange(64)[None])
    assert len(chosen) == 6
    for ids in chosen:
        counts = torch.bincount(ids.flatten(), minlength=16)
        assert int((counts > 0).sum()) >= 14
        assert int(counts.max()) <= 3 * 64 * 2 / 16


def test_no_two_rows_of_a_matrix_are_equal(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, MoeShape(vocab=40000, hidden=512, dtype="float32"))
    with safe_open(tmp_path / "model.safetensors", "pt") as shard:
        rows = shard.get_tensor("lm_head.weight")
    assert len(torch.unique(rows[:, :2], dim=0)) == len(rows)
    assert float(rows.std()) == pytest.approx(1.6 * 512**-0.5, rel=0.01)


def test_progress_ends_with_all_bytes(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    make_checkpoint(
        tmp_path, MoeShape(), max_shard_bytes=1, progress=lambda *call: calls.append(call)
    )
    assert len(calls) > 2
    assert calls[-1][0] == calls[-1][1]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    path = make_checkpoint(tmp_path_factory.mktemp("tokenizer"), MoeShape(vocab=2000))
    loaded = PreTrainedTokenizerFast.from_pretrained(path)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.mark.parametrize("text", ["hello world", "  two\n\nlines\t", "é🙂 — x", "", "aa ab ba"])
def test_tokenizer_has_one_token_per_byte_and_comes_back(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_every_id_decodes_to_something_of_its_own(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == 2000
    tokens = tokenizer.convert_ids_to_tokens(list(range(2000)))
    assert len(set(tokens)) == 2000
    assert all(tokenizer.decode([i]) for i in range(2000))


def test_chat_template_ends_turns_with_the_eos_token(tokenizer: PreTrainedTokenizerFast) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text)
    assert ids[0] == 257
    assert tokenizer.eos_token_id == 258
    assert ids.count(258) == 1


def test_vocabulary_too_small_for_the_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="vocab 258 is too small: the tokenizer needs 259"):
        make_checkpoint(tmp_path, MoeShape(vocab=258))


def test_family_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="llama of this shape has no experts"):
        make_checkpoint(tmp_path, MoeShape(family="llama"))


def test_directory_that_is_not_empty_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").touch()
    assert main([str(tmp_path)]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


def test_command_line_takes_the_shape_and_further_fields(tmp_path: Path) -> None:
    path = tmp_path / "moe"
    arguments = ["--family", "mixtral", "--layers", "1", "--set", "sliding_window=8"]
    assert main([str(path), *arguments]) == 0
    assert read_shape(path, "auto").num_layers == 1
    assert '"sliding_window": 8' in (path / "config.json").read_text()
