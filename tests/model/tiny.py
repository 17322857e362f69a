"""Tiny random checkpoints of many families, and what plain transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 128
COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EIGHT_OF_TWO = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "mixtral-window": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8},
    "qwen2_moe": EIGHT_OF_TWO
    | {
        "shared_expert_intermediate_size": 32,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3_moe": EIGHT_OF_TWO | {"norm_topk_prob": True},
    "qwen3_moe-dense-layer": EIGHT_OF_TWO | {"mlp_only_layers": [1], "tie_word_embeddings": True},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "clip_qkv": 2.0},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 8},
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gpt_oss-yarn": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 8},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "use_qk_norm": True,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "dots1": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2, "logits_scaling": 2.0},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2},
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {},
}


def make_config(family: str) -> Any:
    """The tiny config of a family; the part after a dash names a variant."""
    model_type = family.split("-")[0]
    return AutoConfig.for_model(model_type, **COMMON | FAMILIES[family])


def make_model(config: Any, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Plain transformers with random weights, its reference implementations."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    randomise(model)
    return model.eval()


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """Weights large enough that every part of the model shows in the logits."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.2)
        elif "norm" in name:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.normal_(std=0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.1, 0.1)


def save(model: PreTrainedModel, path: Path, max_shard_size: str = "100KB") -> Path:
    """Save as a checkpoint of several shards."""
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path


@torch.no_grad()
def plain_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """ids: [L] → [L, V] float32, one row alone in one forward without a cache."""
    return model(input_ids=ids[None], use_cache=False).logits[0].float()


def random_ids(length: int, seed: int) -> torch.Tensor:
    """[length] int64 without special tokens."""
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the whole matrix: the norm of the difference over the norm."""
    return float((got - expected).norm() / expected.norm())
