"""A checkpoint's directory without weights: a byte-level tokenizer and a ChatML template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog", "Hello world, how are you today?"] * 4


def byte_level_tokenizer() -> Tokenizer:
    """All 256 bytes, a few merges, and ChatML's special tokens with the ids 0 to 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<extra token>", special=False)])
    return tokenizer


def write_model(
    path: Path,
    *,
    template: str | None = TEMPLATE,
    generation: dict[str, object] | None = None,
    vocab_size: int | None = None,
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    config: dict[str, object] = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    size = vocab_size or tokenizer.get_vocab_size()
    (path / "config.json").write_text(json.dumps({"vocab_size": size}))
    generation = {"eos_token_id": [2, 0]} if generation is None else generation
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path
