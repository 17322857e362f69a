"""The small files of a checkpoint: configuration, generation defaults, tokenizer, chat template.

The tokenizer is rebuilt from the GGUF file's vocabulary and merges. transformers' own conversion of
such metadata loses the splitting of digits; with the pre-tokenizer below, ids equal llama.cpp's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from freetoken.demo.dense import DenseModel
from freetoken.demo.recipe import Form, Recipe
from freetoken.errors import ConfigError

CONTROL_TOKEN = 3
"""gguf.TokenType.CONTROL: <|im_start|> and the like."""

STOP_IDS = [2, 0]
"""<|im_end|> and <|endoftext|>."""

_ARCHITECTURES = {
    Form.QWEN3_MOE: "Qwen3MoeForCausalLM",
    Form.MIXTRAL: "MixtralForCausalLM",
    Form.LLAMA: "LlamaForCausalLM",
}


def write_files(dense: DenseModel, recipe: Recipe, directory: Path) -> None:
    """Write everything but the weights into `directory`."""
    _write_json(directory / "config.json", _config(dense, recipe))
    _write_json(directory / "generation_config.json", _generation_config(dense))
    _write_json(directory / "tokenizer.json", _tokenizer(dense))
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(dense))
    template = dense.fact("tokenizer.chat_template")
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _config(dense: DenseModel, recipe: Recipe) -> dict[str, Any]:
    shape = dense.shape
    return {
        "architectures": [_ARCHITECTURES[recipe.form]],
        "model_type": str(recipe.form),
        "dtype": recipe.dtype,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.expert_hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context_tokens,
        "rms_norm_eps": shape.rms_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,  # for readers older than rope_parameters
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": _token_id(dense, "bos"),
        "eos_token_id": _token_id(dense, "eos"),
        "pad_token_id": _token_id(dense, "padding"),
        **_moe_config(dense, recipe),
    }


def _moe_config(dense: DenseModel, recipe: Recipe) -> dict[str, Any]:
    match recipe.form:
        case Form.QWEN3_MOE:
            return {
                "num_experts": recipe.num_experts,
                "num_experts_per_tok": recipe.experts_per_token,
                "moe_intermediate_size": dense.shape.expert_hidden,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "use_sliding_window": False,
            }
        case Form.MIXTRAL:
            return {
                "num_local_experts": recipe.num_experts,
                "num_experts_per_tok": recipe.experts_per_token,
                "sliding_window": None,
            }
        case Form.LLAMA:
            return {"mlp_bias": False}


def _generation_config(dense: DenseModel) -> dict[str, Any]:
    return {
        "bos_token_id": _token_id(dense, "bos"),
        "eos_token_id": STOP_IDS,
        "pad_token_id": _token_id(dense, "padding"),
        "do_sample": True,
        "temperature": 0.2,  # at 1 a model this small rambles
        "top_p": 0.9,
    }


def _tokenizer(dense: DenseModel) -> dict[str, Any]:
    """tokenizer.json of the `tokenizers` library."""
    kind = (dense.fact("tokenizer.ggml.model"), dense.fact("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ConfigError(f"the GGUF file's tokenizer is {kind}, not ('gpt2', 'smollm')")
    tokens = dense.fact("tokenizer.ggml.tokens")
    types = dense.fact("tokenizer.ggml.token_type")
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(token_id, token)
            for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == CONTROL_TOKEN
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in dense.fact("tokenizer.ggml.merges")],
        },
    }


def _added_token(token_id: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": True}


def _tokenizer_config(dense: DenseModel) -> dict[str, Any]:
    tokens = dense.fact("tokenizer.ggml.tokens")
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{ours}_token": tokens[_token_id(dense, theirs)] for ours, theirs in names.items()},
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": dense.shape.context_tokens,
    }


def _token_id(dense: DenseModel, name: str) -> int:
    return int(dense.fact(f"tokenizer.ggml.{name}_token_id"))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
