"""A tiny real checkpoint, and runtime directories short enough for sockets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.api.tiny_model import TEMPLATE, byte_level_tokenizer
from tests.checkpoints import write_json


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of Qwen3-MoE with random weights and a byte-level tokenizer."""
    return save_tiny(tmp_path_factory.mktemp("checkpoint") / "tiny-moe", num_layers=2)


def save_tiny(path: Path, num_layers: int) -> Path:
    tokenizer = byte_level_tokenizer()
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    write_json(path / "tokenizer_config.json", {"chat_template": TEMPLATE})
    return path


@pytest.fixture(scope="module")
def runtime() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ft-", dir="/tmp") as directory:
        yield Path(directory)
