"""A request's sampling fields, with the model's defaults, as the engine takes them."""

from __future__ import annotations

from typing import TypeVar

from freetoken.api.errors_http import invalid
from freetoken.api.openai_schema import ChatRequest, CompletionRequest, SamplingFields
from freetoken.api.served import Served
from freetoken.wire.messages import Sampling

_T = TypeVar("_T")

SEEDS = 2**63
"""Seeds on the wire are below this; negative ones wrap round."""


def max_tokens_of(request: SamplingFields) -> int | None:
    """The wanted length; None leaves it to the remaining context."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return request.max_tokens


def to_sampling(request: ChatRequest | CompletionRequest, served: Served, choice: int) -> Sampling:
    """How choice number `choice` is drawn; 400 for token ids outside the vocabulary."""
    defaults = served.defaults
    top_p = _or(request.top_p, defaults.top_p)
    top_k = max(0, _or(request.top_k, defaults.top_k))
    if top_p == 0:  # just the likeliest token
        top_p, top_k = 1.0, 1
    min_tokens = request.min_tokens or 0
    limit = max_tokens_of(request)
    if limit is not None and min_tokens > limit:
        raise invalid(f"min_tokens={min_tokens} is more than max_tokens={limit}", "min_tokens")
    return Sampling(
        temperature=_or(request.temperature, defaults.temperature),
        top_p=top_p,
        top_k=top_k,
        min_p=_or(request.min_p, defaults.min_p),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request, served.vocab_size),
        seed=None if request.seed is None else (request.seed + choice) % SEEDS,
        min_tokens=min_tokens,
        stop_ids=_stop_ids(request, served),
        logprobs=_num_logprobs(request),
    )


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _num_logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else None
    return request.logprobs


def _stop_ids(request: SamplingFields, served: Served) -> tuple[int, ...]:
    extra = request.stop_token_ids or []
    for token_id in extra:
        check_token_id(token_id, served.vocab_size, "stop_token_ids")
    own = () if request.ignore_eos else served.eos_ids
    return tuple(dict.fromkeys([*own, *extra]))


def _logit_bias(request: SamplingFields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    biases = []
    for key, bias in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid(f"logit_bias: {key[:80]!r} is no token id", "logit_bias")
        check_token_id(int(key), vocab_size, "logit_bias")
        biases.append((int(key), bias))
    return tuple(biases)


def check_token_id(token_id: int, vocab_size: int, param: str) -> None:
    if not 0 <= token_id < vocab_size:
        raise invalid(
            f"{param}: token id {token_id} is outside the vocabulary, ids go from 0 to "
            f"{vocab_size - 1}",
            param,
        )


def check_prompt_ids(ids: list[int], vocab_size: int, param: str) -> None:
    if not ids:
        raise invalid(f"{param}: the prompt has no tokens; send some text", param)
    check_token_id(min(ids), vocab_size, param)
    check_token_id(max(ids), vocab_size, param)
