"""upcycle.py: the experts are the dense model, and the wrong one is noticed."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from freetoken.demo.dense import DenseModel
from freetoken.demo.files import write_files
from freetoken.demo.recipe import Form, Recipe
from freetoken.demo.upcycle import bf16_pair, write_weights

SHALLOW = 6  # layers
QUESTIONS = ("Why is the sky blue?", "What is the capital of France?")
NEW_TOKENS = 16


@contextmanager
def written(dense: DenseModel, recipe: Recipe, directory: Path) -> Iterator[Any]:
    """The model of `recipe` in fp32; its files are gone afterwards."""
    directory.mkdir()
    write_weights(dense, recipe, directory)
    write_files(dense, recipe, directory)
    try:
        yield load(directory)
    finally:
        shutil.rmtree(directory)
        gc.collect()


def load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


Answers = list[tuple[torch.Tensor, int, torch.Tensor]]
"""Per question: ids of prompt and greedy answer, length of the prompt, dense logits of all."""


@pytest.fixture(scope="module")
def reference(dense: DenseModel, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers_of(dense, tmp_path_factory.mktemp("dense") / "model")


def answers_of(dense: DenseModel, directory: Path) -> Answers:
    answers = []
    with written(dense, Recipe(form=Form.LLAMA), directory) as model:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
        for question in QUESTIONS:
            chat = [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt"
            )["input_ids"]
            ids = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                temperature=None,
                top_p=None,
            )
            answers.append((ids, prompt.shape[1], logits_of(model, ids)))
    return answers


@pytest.fixture(scope="module")
def shallow(
    dense: DenseModel, tmp_path_factory: pytest.TempPathFactory
) -> tuple[DenseModel, Answers]:
    """The first layers of the dense model, and what they answer."""
    first = copy(dense)
    first.shape = replace(dense.shape, num_layers=SHALLOW)
    return first, answers_of(first, tmp_path_factory.mktemp("shallow") / "model")


@torch.inference_mode()
def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits[0]


@pytest.mark.parametrize(
    ("form", "tolerance"),
    [
        # fp32 sums in another order: 1.3e-4 measured with all layers
        pytest.param(Form.MIXTRAL, 1e-3, marks=pytest.mark.slow),
        (Form.QWEN3_MOE, 2e-2),  # and q/k norms that are linear to 5e-5: 5e-3 measured
    ],
)
def test_without_noise_the_experts_are_the_dense_model(
    shallow: tuple[DenseModel, Answers], tmp_path: Path, form: Form, tolerance: float
) -> None:
    dense, answers = shallow
    with written(dense, Recipe(form=form, noise=0), tmp_path / "model") as model:
        for ids, prompt_length, expected in answers:
            logits = logits_of(model, ids)
            assert (logits - expected).abs().max() < tolerance
            # each next token is the likeliest after the ones before it: the greedy texts are equal
            assert logits[prompt_length - 1 : -1].argmax(-1).equal(ids[0, prompt_length:])


@pytest.mark.slow
def test_a_wrong_expert_is_noticed_and_the_right_ones_are_nearly_the_dense_model(
    reference: Answers, demo_dir: Path
) -> None:
    model = load(demo_dir)
    ids, prompt_length, dense_logits = reference[0]
    logits = logits_of(model, ids)
    same = logits[prompt_length - 1 : -1].argmax(-1) == ids[0, prompt_length:]
    assert same.float().mean() > 0.8

    experts = [layer.mlp.experts for layer in model.model.layers]
    for module in experts:  # ids off by one
        roll(module.gate_up_proj)
        roll(module.down_proj)
    moved = (logits_of(model, ids) - logits).abs().max()
    assert moved > 1  # 2 measured

    for module in experts:  # down of another expert than gate and up
        roll(module.down_proj)
    garbled = logits_of(model, ids)
    assert (garbled - logits).abs().max() > 5
    assert (garbled.argmax(-1) == dense_logits.argmax(-1)).float().mean() < 0.3


def roll(parameter: torch.nn.Parameter) -> None:
    """Expert e gets the tensor of expert e - 1."""
    parameter.data = parameter.data.roll(1, dims=0)


@pytest.mark.parametrize("product", [1e-5 * 2.0**48, 1.0, 3.0, 1e-6])
def test_bf16_pairs_are_exact_in_bf16_and_multiply_to_the_product(product: float) -> None:
    pair = bf16_pair(product)
    assert torch.tensor(pair, dtype=torch.bfloat16).double().tolist() == list(pair)
    assert pair[0] * pair[1] == pytest.approx(product, rel=2**-13)


def test_the_norm_weights_are_the_documented_pair() -> None:
    assert bf16_pair(1e-5 * 2.0**48) == (46592.0, 60416.0)
