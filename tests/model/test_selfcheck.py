from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from freetoken.errors import ConfigError, EngineError
from freetoken.model.assemble import ExpertsMode
from freetoken.model.miniature import VOCAB_SIZE, WINDOW, miniatures
from freetoken.model.selfcheck import check_config, check_model
from tests.model import tiny


def large(model_type: str, **changes: Any) -> Any:
    """The config of a model of ordinary size."""
    return AutoConfig.for_model(model_type, **changes)


@pytest.mark.parametrize("experts", ["in-place", "slots"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "qwen3", "gemma2"])
def test_models_that_equal_transformers_pass(model_type: str, experts: ExpertsMode) -> None:
    check_config(large(model_type), experts=experts)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "qwen3", "gemma2"])
def test_models_pass_on_the_way_of_a_gpu(model_type: str) -> None:
    check_config(large(model_type), experts="slots", dtype=torch.float16, use_kernels=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "minimax_m2", "glm4_moe"])
def test_models_pass_in_the_type_that_is_served(model_type: str, dtype: torch.dtype) -> None:
    check_config(large(model_type, num_hidden_layers=4), experts="in-place", dtype=dtype)


def test_check_reads_the_config_only(tmp_path: Path) -> None:
    config = tiny.make_config("qwen2_moe")
    config.dtype = "bfloat16"
    config.save_pretrained(tmp_path)
    check_model(tmp_path, experts="in-place")


def test_a_check_leaves_no_trace_in_what_compiled_code_is_found_by() -> None:
    """torch.compile's cache knows code by these settings: a worker that skips the check would find
    nothing that one that ran it has left."""
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "none"  # as torch starts with
    try:
        check_config(tiny.make_config("qwen3"), experts="in-place")
        assert products.fp32_precision == "none"
        torch.set_float32_matmul_precision("high")
        check_config(tiny.make_config("qwen3"), experts="in-place")
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
        products.fp32_precision = before


def test_model_that_differs_is_refused_with_class_and_difference() -> None:
    # Its attention in chunks reaches attention functions through the mask alone.
    config = large("llama4_text", num_hidden_layers=4)
    with pytest.raises(
        EngineError,
        match=r"Llama4ForCausalLM cannot be served: logits differ .* relative .* rows in one batch",
    ):
        check_config(config, experts="in-place")


@pytest.mark.parametrize("model_type", ["qwen3_next", "jamba"])
def test_layers_that_keep_another_state_are_refused(model_type: str) -> None:
    config = large(model_type, num_hidden_layers=8)
    with pytest.raises(ConfigError, match=r"keeps k/v in layers \[.* another kind of state"):
        check_config(config, experts="in-place")


def test_config_that_does_not_run_is_refused_with_the_reason() -> None:
    config = large("qwen3_moe", num_hidden_layers=4)
    config.num_experts_per_tok = config.num_experts + 1
    with pytest.raises(EngineError, match=r"Qwen3MoeForCausalLM does not run .* k not in range"):
        check_config(config, experts="in-place")


def test_miniature_shows_every_kind_of_layer() -> None:
    config = large("gpt_oss")
    small = next(miniatures(config))
    assert small.num_hidden_layers == 2
    assert set(small.layer_types) == set(config.layer_types)
    assert small.sliding_window == WINDOW


def test_miniature_keeps_routing_rope_and_head_size() -> None:
    config = large("glm4_moe", num_hidden_layers=30, n_routed_experts=160, first_k_dense_replace=3)
    small = next(miniatures(config))
    size = config.hidden_size // config.num_attention_heads
    assert small.hidden_size // small.num_attention_heads == size
    assert small.num_hidden_layers == 4
    for name in (
        "n_routed_experts",
        "num_experts_per_tok",
        "routed_scaling_factor",
        "n_group",
        "rope_parameters",
        "max_position_embeddings",
    ):
        assert getattr(small, name) == getattr(config, name), name
    assert small.vocab_size == VOCAB_SIZE
    assert small.num_attention_heads > small.num_key_value_heads > 1


def test_miniature_of_a_config_whose_head_size_follows_from_hidden_size_builds() -> None:
    config = large("phimoe", num_hidden_layers=4)
    size = config.hidden_size // config.num_attention_heads
    assert any(
        small.hidden_size // small.num_attention_heads == size for small in miniatures(config)
    )


def test_miniatures_leave_the_config_alone() -> None:
    config = large("gpt_oss")
    before = config.to_dict()
    next(miniatures(config))
    check_config(config, experts="in-place")
    assert config.to_dict() == before
