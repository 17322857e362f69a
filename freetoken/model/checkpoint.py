"""A checkpoint directory: its config, its shards, and where each tensor lies.

Reads config.json and the headers of safetensors files; tensors.py reads what is in them.
Whatever is wrong with the directory is said here, with the file's name, before anything is loaded.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from freetoken.errors import ConfigError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FLOAT_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor of the checkpoint lies; `dtype` is safetensors' name for it.

    `offset_bytes`: from the start of the file.
    """

    key: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    offset_bytes: int


def read_config(path: Path) -> PreTrainedConfig:
    """The model's config, from config.json alone.

    Raises ConfigError when the directory or file is unusable, the architecture is unknown to the
    installed transformers, or the checkpoint is quantised.
    """
    file = path / "config.json"
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory with a checkpoint")
    raw = _read_json(file)
    _refuse_quantised(path, raw)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"transformers cannot read {file}: {reason}") from error
    assert isinstance(config, PreTrainedConfig)
    return config


def resolve_dtype(path: Path, config: PreTrainedConfig, dtype: str) -> torch.dtype:
    """`dtype` of the options as a torch type; "auto": the config's, else the first tensor's."""
    if dtype != "auto":
        return getattr(torch, dtype)  # type: ignore[no-any-return]
    text_dtype = config.get_text_config().dtype or config.dtype
    if isinstance(text_dtype, str):
        text_dtype = getattr(torch, text_dtype)
    if isinstance(text_dtype, torch.dtype):
        return text_dtype
    for tensor in list_tensors(path).values():
        if tensor.dtype in FLOAT_DTYPES:
            return FLOAT_DTYPES[tensor.dtype]
    return torch.float32


def list_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint by its key, read from the shards' headers.

    Raises ConfigError for missing, truncated or unreadable shards.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in _shards(path):
        tensors.update(_read_header(file))
    return tensors


def digest_files(path: Path) -> str:
    """What the tensors depend on, as 64 hexadecimal digits, without reading them: the config, and
    each shard's name, size, time of change and header. ConfigError as `list_tensors`."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in _shards(path):
        try:
            info = file.stat()
            with file.open("rb") as stream:
                (header_bytes,) = struct.unpack("<Q", stream.read(8))
                header = stream.read(min(header_bytes, info.st_size))
        except (OSError, struct.error) as error:
            raise ConfigError(f"cannot read shard {file}: {error}") from error
        digest.update(f"{file.name} {info.st_size} {info.st_mtime_ns}\n".encode() + header)
    return digest.hexdigest()


def _shards(path: Path) -> list[Path]:
    index = path / INDEX_NAME
    if index.exists():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise ConfigError(f"{index} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
    elif (path / SINGLE_NAME).exists():
        names = [SINGLE_NAME]
    else:
        raise ConfigError(f"{path} has neither {SINGLE_NAME} nor {INDEX_NAME}")
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise ConfigError(
            f"{len(missing)} of {len(names)} shards are missing in {path}, first {missing[0]}"
        )
    return [path / name for name in names]


def _read_header(file: Path) -> dict[str, StoredTensor]:
    try:
        with file.open("rb") as stream:
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(header_bytes))
    except OSError as error:
        raise ConfigError(f"cannot read shard {file}: {error.strerror}") from error
    except (struct.error, ValueError, MemoryError, OverflowError) as error:
        raise ConfigError(f"shard {file} is not a safetensors file or is damaged") from error
    tensors = {}
    data_bytes = 0
    try:
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            lo, hi = entry["data_offsets"]
            data_bytes = max(data_bytes, hi)
            tensors[key] = StoredTensor(
                key, file, entry["dtype"], tuple(entry["shape"]), hi - lo, 8 + header_bytes + lo
            )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"shard {file} is not a safetensors file or is damaged") from error
    expected = 8 + header_bytes + data_bytes
    actual = file.stat().st_size
    if actual < expected:
        raise ConfigError(f"shard {file} is truncated: {actual} of {expected} bytes")
    return tensors


def _read_json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{file} does not exist") from error
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} is not a JSON object")
    return data


def _refuse_quantised(path: Path, raw: dict[str, Any]) -> None:
    candidates = [raw.get("quantization_config")]
    candidates += [v.get("quantization_config") for v in raw.values() if isinstance(v, dict)]
    modelopt = path / "hf_quant_config.json"
    if modelopt.exists():
        candidates.append(_read_json(modelopt).get("quantization"))
    for found in candidates:
        if isinstance(found, dict):
            method = found.get("quant_method") or found.get("quant_algo") or "unknown"
            form = found.get("format") or found.get("fmt")
            named = f"quant_method {method}" + (f", format {form}" if form else "")
            raise ConfigError(
                f"{path} is quantised ({named}); FreeToken runs unquantised bfloat16, float16 and "
                "float32 checkpoints: use the original weights"
            )
