"""The checkpoint's tokenizer and chat template, read from its files with `tokenizers` alone.

transformers' tokenizer classes are not used: some versions import torch with them. What they do
beyond tokenizer.json is done here: tokens that only tokenizer_config.json names are added, padding
and truncation are off, and the special tokens' names are given to the template.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from freetoken import log
from freetoken.api.chat_template import ChatTemplate
from freetoken.api.detokenize import ByteDetokenizer, Detokenizer, TokenBytes, WindowDetokenizer
from freetoken.errors import ConfigError

SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
INLINE_CHARS = 4096
"""Texts up to this length are tokenised where we are (well under a millisecond); longer ones in a
thread, where `tokenizers` lets go of the interpreter lock."""

_log = log.get(__name__)


class Tokenizer:
    """Text to ids and back. Safe to use from several threads."""

    def __init__(self, backend: Backend, special_tokens: dict[str, str]) -> None:
        self._backend = backend
        self.special_tokens = special_tokens
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self._token_bytes = TokenBytes.of(backend)

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """ConfigError names the file that is missing or broken."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{path} is missing; the model needs a tokenizer.json (transformers' "
                "AutoTokenizer.from_pretrained(…).save_pretrained(…) writes one)"
            )
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise ConfigError(f"{path} is no usable tokenizer: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = read_json(model_dir / "tokenizer_config.json")
        legacy = read_json(model_dir / "special_tokens_map.json")
        special_tokens = {
            name: text
            for name in SPECIAL_TOKENS
            if (text := _token_text(config.get(name, legacy.get(name)))) is not None
        }
        _add_missing(backend, config, special_tokens, model_dir / "tokenizer_config.json")
        return cls(backend, special_tokens)

    def id_of(self, token: str) -> int | None:
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`. Special tokens written out in it become their ids, as elsewhere."""
        # Without offsets, which `encode` computes too: a third of its time for long texts.
        encodings = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encodings[0].ids
        return ids

    async def encode_async(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The same without holding up the event loop."""
        if len(text) <= INLINE_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """One-shot decoding; ids that the vocabulary lacks give no text."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(
        self, *, skip_special_tokens: bool = True, context_ids: Sequence[int] = ()
    ) -> Detokenizer:
        """A new incremental decoding. With `context_ids` the text continues theirs: a decoder that
        drops the first blank of a text then keeps it."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        if self._token_bytes is not None:
            return ByteDetokenizer(self._token_bytes, skipped)
        decode = self.decode

        def decode_window(ids: Sequence[int]) -> str:
            return decode(ids, skip_special_tokens=skip_special_tokens)

        return WindowDetokenizer(decode_window, skipped, context_ids)

    def bytes_of(self, token_id: int) -> bytes:
        """What one token stands for, half characters included; special tokens as written."""
        if self._token_bytes is not None:
            return self._token_bytes[token_id]
        return _decode_alone(self._backend, token_id)


@lru_cache(maxsize=65536)
def _decode_alone(backend: Backend, token_id: int) -> bytes:
    token: str | None = backend.id_to_token(token_id)
    if token is None:
        return b""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    # After another token, so that a decoder that drops the first blank keeps this one.
    alone: str = backend.decode([token_id], skip_special_tokens=False)
    twice: str = backend.decode([token_id, token_id], skip_special_tokens=False)
    return twice[len(alone) :].encode()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file; ConfigError if it is broken."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def load_chat_template(model_dir: Path, special_tokens: dict[str, str]) -> ChatTemplate | None:
    """The default chat template: chat_template.jinja, else tokenizer_config.json's; None without.

    ConfigError if it does not compile.
    """
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        try:
            source: object = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
    else:
        path = model_dir / "tokenizer_config.json"
        source = read_json(path).get("chat_template")
        if source is None:
            path = model_dir / "chat_template.json"
            source = read_json(path).get("chat_template")
    if isinstance(source, list):  # several, by name
        entries = [entry for entry in source if isinstance(entry, dict)]
        source = {entry.get("name"): entry.get("template") for entry in entries}.get("default")
    if source is None:
        _log.warning(log.event("chat_template.missing", model=model_dir.name))
        return None
    if not isinstance(source, str):
        raise ConfigError(f"{path}: chat_template must be text, not a {type(source).__name__}")
    return ChatTemplate.compile(source, special_tokens, path)


def _token_text(value: object) -> str | None:
    """A token as tokenizer_config.json writes it: text, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_missing(
    backend: Backend, config: dict[str, Any], special_tokens: dict[str, str], path: Path
) -> None:
    """Add tokens that only tokenizer_config.json knows, in the order of their ids."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    try:
        by_id = [(int(i), AddedToken(**listed[i])) for i in sorted(listed, key=int)]
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: added_tokens_decoder is malformed: {error}") from error
    for token_id, token in by_id:
        if token.content not in known:
            backend.add_tokens([token])
            known.add(token.content)
            actual_id = backend.token_to_id(token.content)
            if actual_id != token_id:
                raise ConfigError(
                    f"{path} gives token {token.content!r} the id {token_id}, but after those of "
                    f"tokenizer.json it would be {actual_id}; the two files do not match"
                )
    missing = [text for text in special_tokens.values() if text not in known]
    backend.add_special_tokens([AddedToken(text, special=True) for text in missing])
