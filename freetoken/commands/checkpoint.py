"""What can be said about a checkpoint directory without loading it: is it whole, can it run?

Reads config.json, the index, the headers of the safetensors files (eight bytes of length, then
JSON: https://github.com/huggingface/safetensors#format) and the tokenizer: seconds at most, no
torch. Each fault is one ConfigError that names the file.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freetoken.errors import ConfigError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER = "tokenizer.json"
MODELOPT = "hf_quant_config.json"
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16,
    "BF16": 16, "I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
CAST_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""What `--dtype` converts; other types stay as they are."""
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint. `weight_bytes` is what its tensors take in memory."""

    directory: Path
    model_type: str
    weight_bytes: int
    has_chat_template: bool


def check(directory: Path, dtype: str = "auto") -> Checkpoint:
    """All checks in order of cost; ConfigError for the first fault."""
    _check_readable(directory)
    config = check_config(directory)
    weight_bytes = check_weights(directory, dtype)
    check_tokenizer(directory)
    return Checkpoint(
        directory=directory,
        model_type=str(config["model_type"]),
        weight_bytes=weight_bytes,
        has_chat_template=_has_chat_template(directory),
    )


def _check_readable(directory: Path) -> None:
    try:
        os.listdir(directory)
        os.stat(os.path.join(directory, os.curdir))  # may we enter it?
    except OSError as error:
        raise ConfigError(f"cannot read directory {directory}: {error.strerror}") from error


def check_config(directory: Path) -> dict[str, Any]:
    """config.json names a model type and no quantisation."""
    path = directory / CONFIG
    if not path.exists():
        files = sorted(file.name for file in directory.glob("*.gguf"))
        hint = f"; {files[0]} is a GGUF file, which is not supported" if files else ""
        raise ConfigError(f"{directory} holds no {CONFIG}, so it is no checkpoint{hint}")
    config = _read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{path} names no model_type")
    _refuse_quantised(directory, config)
    return config


def _refuse_quantised(directory: Path, config: dict[str, Any]) -> None:
    """The worker refuses the same; here it costs no seconds and no download."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    found = [part.get("quantization_config") for part in parts]
    if (directory / MODELOPT).exists():
        found.append(_read_json(directory / MODELOPT).get("quantization"))
    for entry in filter(None, found):
        names = entry if isinstance(entry, dict) else {}
        method = names.get("quant_method") or names.get("quant_algo") or "not named"
        raise ConfigError(
            f"{directory} is quantised (quant_method {method}), which FreeToken cannot run; use "
            "the unquantised checkpoint (bfloat16, float16 or float32)"
        )


def check_tokenizer(directory: Path) -> None:
    """tokenizer.json loads."""
    from tokenizers import Tokenizer

    path = directory / TOKENIZER
    if not path.exists():
        raise ConfigError(
            f"{directory} holds no {TOKENIZER}; save the tokenizer in its fast form there"
        )
    try:
        Tokenizer.from_str(_read_text(path))
    except ConfigError:
        raise
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ConfigError(f"{path} is no tokenizer: {error}") from error
    config = directory / "tokenizer_config.json"
    if config.exists():
        _read_json(config)


def _has_chat_template(directory: Path) -> bool:
    if (directory / "chat_template.jinja").exists():
        return True
    config = directory / "tokenizer_config.json"
    return config.exists() and bool(_read_json(config).get("chat_template"))


# ---------------------------------------------------------------- weights


def check_weights(directory: Path, dtype: str = "auto") -> int:
    """Every shard is there and whole; returns the bytes of all tensors, cast to `dtype`."""
    shards = _shards(directory)
    for name in shards:
        if not (directory / name).exists():
            raise ConfigError(
                f"{directory} is incomplete: {name} is missing ({len(shards)} weight files named "
                f"in {INDEX}); download it again"
            )
    total = 0
    for name, expected in shards.items():
        header = read_header(directory / name)
        missing = sorted(expected - header.keys())
        if missing:
            raise ConfigError(
                f"{directory / name} lacks tensor {missing[0]}, which {INDEX} puts there"
            )
        total += sum(_tensor_bytes(entry, dtype) for entry in header.values())
    return total


def _shards(directory: Path) -> dict[str, set[str]]:
    """Weight files and the tensors that the index expects in each."""
    if (directory / INDEX).exists():
        weight_map = _read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{directory / INDEX} has no weight_map")
        shards: dict[str, set[str]] = {}
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or Path(name).name != name:
                raise ConfigError(f"{directory / INDEX} names {name!r}, which is no file name")
            shards.setdefault(name, set()).add(tensor)
        return dict(sorted(shards.items()))
    if (directory / SINGLE).exists():
        return {SINGLE: set()}
    other = next(iter(sorted([*directory.glob("*.bin"), *directory.glob("*.pt*")])), None)
    hint = f"; {other.name} is pickled: convert it to safetensors" if other else ""
    raise ConfigError(f"{directory} holds no weights ({SINGLE} or {INDEX}){hint}")


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """The tensors of a safetensors file; ConfigError if the file is damaged or cut short."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ConfigError(f"{path} is no safetensors file, or cut short ({size} bytes)")
            header = json.loads(file.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        for entry in tensors.values():
            _tensor_bytes(entry, "auto")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(f"{path} has a damaged header: {error!r}") from error
    if size != 8 + length + end:
        raise ConfigError(
            f"{path} has {size} bytes, its header promises {8 + length + end}: "
            "cut short or damaged; download it again"
        )
    return tensors


def _tensor_bytes(entry: dict[str, Any], dtype: str) -> int:
    elements = 1
    for dimension in entry["shape"]:
        elements *= int(dimension)
    if dtype != "auto" and entry["dtype"] in CAST_DTYPES:
        return elements * DTYPE_BYTES[dtype]
    return elements * DTYPE_BITS[entry["dtype"]] // 8


# ---------------------------------------------------------------- files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
