"""What this server serves: names, tokenizer, template, generation defaults, and the engine.

Read once from the checkpoint's directory before anything else starts; handlers share it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from freetoken.api.chat_template import ChatTemplate
from freetoken.api.errors_http import ApiError
from freetoken.api.tokenizer import Tokenizer, load_chat_template, read_json
from freetoken.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Defaults:
    """generation_config.json's sampling, for fields that a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Served:
    """One model. `names[0]` is what responses call it unless the request named another."""

    names: tuple[str, ...]
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: Defaults
    eos_ids: tuple[int, ...]
    vocab_size: int
    created_s: int

    def check_name(self, name: str | None) -> str:
        """The name to answer with; 404 lists what there is."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            available = ", ".join(self.names)
            raise ApiError(
                404,
                f"model {name!r} is not served here; available: {available}",
                code="model_not_found",
                param="model",
            )
        return name


def load_served(model_dir: Path, served_model_name: Sequence[str]) -> Served:
    """Everything from the files in `model_dir`; ConfigError names the one that is wrong."""
    if not model_dir.is_dir():
        raise ConfigError(f"model directory {model_dir} does not exist or is no directory")
    config = read_json(model_dir / "config.json")
    generation = read_json(model_dir / "generation_config.json")
    tokenizer = Tokenizer.load(model_dir)
    text_config = config.get("text_config")
    if not isinstance(text_config, dict):
        text_config = config
    declared = text_config.get("vocab_size", config.get("vocab_size"))
    vocab_size: int = declared if _is_id(declared) else tokenizer.vocab_size
    eos_ids = _eos_ids(generation, text_config, config, tokenizer)
    return Served(
        names=tuple(served_model_name) or (_own_name(model_dir),),
        tokenizer=tokenizer,
        template=load_chat_template(model_dir, tokenizer.special_tokens),
        defaults=_defaults(generation, model_dir / "generation_config.json"),
        eos_ids=tuple(token_id for token_id in eos_ids if token_id < vocab_size),
        vocab_size=vocab_size,
        created_s=int(time.time()),
    )


def _own_name(model_dir: Path) -> str:
    """`org/name` for a snapshot in the hub's cache, else the directory's name."""
    path = model_dir.resolve()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name


def _defaults(generation: dict[str, Any], path: Path) -> Defaults:
    def number(name: str, default: float, low: float, high: float) -> float:
        value = generation.get(name)
        if value is None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            raise ConfigError(f"{path}: {name} is {value!r}, must be from {low:g} to {high:g}")
        return float(value)

    if generation.get("do_sample") is False and generation.get("temperature") is None:
        generation = {**generation, "temperature": 0.0}
    return Defaults(
        temperature=number("temperature", 1.0, 0.0, 100.0),
        top_p=number("top_p", 1.0, 0.0, 1.0),
        top_k=int(max(0, number("top_k", 0, -1, 2**31 - 1))),
        min_p=number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=number("repetition_penalty", 1.0, 1e-6, 100.0),
    )


def _eos_ids(
    generation: dict[str, Any],
    text_config: dict[str, Any],
    config: dict[str, Any],
    tokenizer: Tokenizer,
) -> tuple[int, ...]:
    """Where generation stops: the configured ids and the tokenizer's own end of sequence."""
    ids: list[int] = []
    for source in (generation, config, text_config):
        value = source.get("eos_token_id")
        if value is not None:
            ids += [i for i in (value if isinstance(value, list) else [value]) if _is_id(i)]
            break
    if (text := tokenizer.special_tokens.get("eos_token")) is not None:
        own = tokenizer.id_of(text)
        ids += [] if own is None else [own]
    return tuple(dict.fromkeys(ids))


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
