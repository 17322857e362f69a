"""A checkpoint small enough to write by hand: no torch, a few tensors, a real tokenizer."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models


def write_checkpoint(directory: Path, **config: Any) -> Path:
    """Two shards with an index, config.json, tokenizer.json."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", {"model_type": "qwen3_moe", **config})
    write_safetensors(directory / "model-1.safetensors", {"a": [2, 3], "b": [4]})
    write_safetensors(directory / "model-2.safetensors", {"c": [5]})
    weight_map = {
        "a": "model-1.safetensors",
        "b": "model-1.safetensors",
        "c": "model-2.safetensors",
    }
    write_json(directory / "model.safetensors.index.json", {"weight_map": weight_map})
    Tokenizer(models.WordLevel({"a": 0, "?": 1}, "?")).save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
    return directory


def write_safetensors(path: Path, shapes: dict[str, list[int]], dtype: str = "BF16") -> None:
    """Zeros of two bytes each."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, count = end, 1
        for size in shape:
            count *= size
        end = start + 2 * count
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
