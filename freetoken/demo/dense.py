"""Reads the dense source model from its GGUF file: shape, tensors, tokenizer facts.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; the `gguf` package parses it and
dequantises. What it does not undo is llama.cpp's row order of q and k, see `unpermute`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from freetoken.demo.recipe import Shape
from freetoken.errors import ConfigError

Array = npt.NDArray[np.float32]


class DenseModel:
    """A llama-architecture GGUF file. Tensors come in fp32 with the names GGUF gives them."""

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self.fact("general.architecture")
        if architecture != "llama":
            raise ConfigError(f"{path} holds a {architecture} model; the demo is made from llama")
        heads = self.fact("llama.attention.head_count")
        self.shape = Shape(
            num_layers=self.fact("llama.block_count"),
            hidden=self.fact("llama.embedding_length"),
            expert_hidden=self.fact("llama.feed_forward_length"),
            num_heads=heads,
            num_kv_heads=self.fact("llama.attention.head_count_kv"),
            head_dim=self.fact("llama.embedding_length") // heads,
            vocab_size=len(self.fact("tokenizer.ggml.tokens")),
            context_tokens=self.fact("llama.context_length"),
            rope_theta=self.fact("llama.rope.freq_base"),
            rms_eps=round(self.fact("llama.attention.layer_norm_rms_epsilon"), 12),  # was fp32
        )

    def fact(self, key: str) -> Any:
        """A metadata value; ConfigError if the file lacks it."""
        field = self._reader.get_field(key)
        if field is None:
            raise ConfigError(f"the GGUF file has no {key}")
        return field.contents()

    def tensor(self, name: str) -> Array:
        """[out, in] (or [n]) fp32, a copy."""
        packed = self._tensors[name]
        return np.array(gguf.quants.dequantize(packed.data, packed.tensor_type), dtype=np.float32)

    def query(self, layer: int) -> Array:
        """q_proj in transformers' row order."""
        return unpermute(self.tensor(f"blk.{layer}.attn_q.weight"), self.shape.num_heads)

    def key(self, layer: int) -> Array:
        """k_proj in transformers' row order."""
        return unpermute(self.tensor(f"blk.{layer}.attn_k.weight"), self.shape.num_kv_heads)


def unpermute(weight: Array, num_heads: int) -> Array:
    """Rows of q or k from llama.cpp's rope layout (pairs adjacent) to transformers' (halves apart).

    Without it the model answers nothing but <|im_end|>.
    """
    rows, columns = weight.shape
    half = rows // num_heads // 2
    pairs = weight.reshape(num_heads, half, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))
