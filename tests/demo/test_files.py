"""files.py: tokenizer, template and configuration of the built demo."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast

IM_END = 2


@pytest.fixture(scope="module")
def tokenizer(demo_dir: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(demo_dir)


def test_digits_are_tokens_of_their_own(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode("In 2024, 31415 fell.")
    tokens = [tokenizer.decode([token_id]).strip() for token_id in ids]
    assert [token for token in tokens if token.isdigit()] == list("202431415")


@pytest.mark.parametrize(
    "text",
    [
        "plain words",
        " two  blanks\r\n\ttab",
        "naïve 🙂🏳️‍🌈 日本語",
        "<|im_start|>user\nhi<|im_end|>\n",
    ],
)
def test_decoding_gives_the_text_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_tokens_are_single_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, IM_END]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_the_chat_template_adds_a_default_system_prompt(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_generation_defaults_stop_at_both_ends_and_do_not_ramble(demo_dir: Path) -> None:
    defaults = GenerationConfig.from_pretrained(demo_dir)
    assert defaults.eos_token_id == [IM_END, 0]
    assert (defaults.temperature, defaults.top_p, defaults.do_sample) == (0.2, 0.9, True)


def test_transformers_reads_the_configuration(demo_dir: Path) -> None:
    config = AutoConfig.from_pretrained(demo_dir)
    assert (config.model_type, config.num_experts, config.num_experts_per_tok) == (
        *("qwen3_moe", 8, 2),
    )
    assert config.rope_parameters["rope_theta"] == 1e5
    assert (config.norm_topk_prob, config.tie_word_embeddings) == (True, True)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-5, 8192)


def test_every_shard_is_indexed_and_readable_by_others(demo_dir: Path) -> None:
    index = json.loads((demo_dir / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in demo_dir.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == shards
    assert len(shards) > 1
    assert {stat.S_IMODE(path.stat().st_mode) for path in demo_dir.iterdir()} == {0o644}
    sizes = sum((demo_dir / name).stat().st_size for name in shards)
    assert 0 < sizes - index["metadata"]["total_size"] < 1_000_000
