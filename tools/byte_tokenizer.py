"""A tokenizer with one token per byte and a chat template, for synthetic checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_BYTES = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(path: Path, *, vocab_size: int, max_length: int) -> None:
    """One token per byte; the rest of the vocabulary decodes to letters and is never encoded to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(alphabet) == NUM_BYTES
    vocab = {character: i for i, character in enumerate(alphabet)}
    first_filler = NUM_BYTES + len(SPECIAL_TOKENS)
    vocab |= {_letters(i - first_filler): i for i in range(first_filler, vocab_size)}
    vocab |= {token: NUM_BYTES + i for i, token in enumerate(SPECIAL_TOKENS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_length,
            "eos_token": SPECIAL_TOKENS[2],
            "pad_token": SPECIAL_TOKENS[0],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    ends = [NUM_BYTES + 2, NUM_BYTES]
    _write_json(path / "generation_config.json", {"eos_token_id": ends, "pad_token_id": NUM_BYTES})


def _letters(number: int) -> str:
    """A different lower-case word of at least two letters for each number."""
    word = ""
    number += 26
    while number >= 0:
        word = chr(ord("a") + number % 26) + word
        number = number // 26 - 1
    return word


def _write_json(file: Path, data: dict[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=1) + "\n")
