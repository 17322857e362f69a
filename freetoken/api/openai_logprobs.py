"""Logprobs as OpenAI's two endpoints write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from freetoken.api.choice import Entry
from freetoken.api.tokenizer import Tokenizer
from freetoken.wire.messages import unpack_ids

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks; OpenAI's documentation uses the same number."""


def chat_logprobs(entries: Sequence[Entry], tokenizer: Tokenizer) -> dict[str, Any]:
    """The object of `choices[].logprobs` in chat."""
    return {
        "content": [
            _chat_token(entry.token_id, entry.logprobs.sampled, tokenizer)
            | {
                "top_logprobs": [
                    _chat_token(token_id, logprob, tokenizer) for token_id, logprob in _top(entry)
                ]
            }
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(
    entries: Sequence[Entry], tokenizer: Tokenizer, num_top: int
) -> dict[str, Any]:
    """The object of `choices[].logprobs` in completions. The sampled token is among the top."""
    top: list[dict[str, float]] = []
    for entry in entries:
        ranked = {_name(token_id, tokenizer): _finite(value) for token_id, value in _top(entry)}
        ranked.setdefault(_name(entry.token_id, tokenizer), _finite(entry.logprobs.sampled))
        top.append(ranked)
    return {
        "tokens": [_name(entry.token_id, tokenizer) for entry in entries],
        "token_logprobs": [_finite(entry.logprobs.sampled) for entry in entries],
        "top_logprobs": top if num_top else None,
        "text_offset": [entry.offset for entry in entries],
    }


def _top(entry: Entry) -> list[tuple[int, float]]:
    return list(zip(unpack_ids(entry.logprobs.top_ids), entry.logprobs.top, strict=False))


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.bytes_of(token_id)
    return {
        "token": raw.decode(errors="replace"),
        "logprob": _finite(logprob),
        "bytes": list(raw),
    }


def _name(token_id: int, tokenizer: Tokenizer) -> str:
    """Text of a token, or OpenAI's notation for half a character: `bytes:\\xe2\\x80`."""
    raw = tokenizer.bytes_of(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB
