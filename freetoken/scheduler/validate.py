"""What messages of peers must satisfy beyond their types. Plain functions.

A request that makes no sense is refused here: inside a step it would take other rows along.
"""

from __future__ import annotations

import math
from array import array

from freetoken.errors import ErrorCode, RequestError
from freetoken.scheduler.node import TOKEN_BYTES
from freetoken.wire.messages import Sampling, Submit, WorkerReady, unpack_ids

MAX_REQUEST_ID_CHARS = 128

EXTREME = 1e6
"""Sampling is computed in fp32: a factor or summand far beyond this, or below its inverse, makes
logits infinite, and a row with nothing to draw from fails its whole step."""


def check_submit(submit: Submit, vocab_size: int) -> None:
    """RequestError naming the field, the value and the limit."""
    if len(submit.request_id) > MAX_REQUEST_ID_CHARS:
        raise _invalid(
            f"request id has {len(submit.request_id)} characters, the limit is "
            f"{MAX_REQUEST_ID_CHARS}",
            "request_id",
        )
    if len(submit.prompt_ids) % TOKEN_BYTES:
        raise _invalid(
            f"prompt ids are {len(submit.prompt_ids)} bytes, no multiple of {TOKEN_BYTES}", "prompt"
        )
    if not submit.prompt_ids:
        raise _invalid("prompt is empty; give at least one token", "prompt")
    _check_vocabulary(submit.prompt_ids, vocab_size)
    if submit.max_tokens is not None and submit.max_tokens < 1:
        raise _invalid(f"max_tokens is {submit.max_tokens}, it must be at least 1", "max_tokens")
    _check_sampling(submit.sampling, vocab_size)


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    bounds: tuple[tuple[str, float, float, float], ...] = (
        ("temperature", sampling.temperature, 0, EXTREME),
        ("top_p", sampling.top_p, 0, 1),
        ("top_k", sampling.top_k, 0, math.inf),
        ("min_p", sampling.min_p, 0, 1),
        ("presence_penalty", sampling.presence_penalty, -EXTREME, EXTREME),
        ("frequency_penalty", sampling.frequency_penalty, -EXTREME, EXTREME),
        ("repetition_penalty", sampling.repetition_penalty, 1 / EXTREME, EXTREME),
        ("min_tokens", sampling.min_tokens, 0, math.inf),
        ("logprobs", sampling.logprobs or 0, 0, vocab_size),
        ("seed", sampling.seed or 0, 0, (1 << 63) - 1),
    )
    for name, value, least, most in bounds:
        if not (least <= value <= most and math.isfinite(value)):
            raise _invalid(f"{name} is {value}, it must be in [{least}, {most}]", name)
    if sampling.top_p == 0:
        raise _invalid(f"top_p is {sampling.top_p}, it must be above 0", "top_p")
    for token_id, bias in sampling.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise _invalid(
                f"logit_bias names token {token_id}, the vocabulary has {vocab_size}", "logit_bias"
            )
        if not abs(bias) <= EXTREME:
            raise _invalid(
                f"logit_bias of token {token_id} is {bias}, it must be in [{-EXTREME}, {EXTREME}]",
                "logit_bias",
            )
    if sampling.min_tokens and len(sampling.stop_ids) >= vocab_size:
        num_stops = sum(0 <= token_id < vocab_size for token_id in set(sampling.stop_ids))
        if num_stops == vocab_size:
            raise _invalid(
                f"min_tokens is {sampling.min_tokens}, but all {vocab_size} tokens of the "
                "vocabulary are stop ids; leave one out",
                "stop_token_ids",
            )


def fault_of(ready: WorkerReady) -> str | None:
    """What is wrong with a worker's capacities, or None: a context that the pool cannot hold
    would leave a row without pages."""
    positive = (
        "num_pages",
        "page_size",
        "max_rows",
        "num_layers",
        "max_step_tokens",
        "max_pass_tokens",
    )
    for name in positive:
        if getattr(ready, name) < 1:
            return f"{name} is {getattr(ready, name)}, it must be at least 1"
    pool_tokens = ready.num_pages * ready.page_size
    if not 2 <= ready.context_tokens <= min(pool_tokens, ready.window):
        return (
            f"context_tokens is {ready.context_tokens}, it must be in [2, {pool_tokens}] (the "
            f"pool) and within the window of {ready.window}"
        )
    if ready.vocab_size < 1:
        return f"vocab_size is {ready.vocab_size}"
    return None


def _check_vocabulary(prompt_ids: bytes, vocab_size: int) -> None:
    ids = unpack_ids(prompt_ids)
    if max(array("I", ids.tobytes())) < vocab_size:  # negative ids are large as unsigned
        return
    at, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
    raise _invalid(
        f"prompt token {at} is {bad}, the vocabulary has {vocab_size} (0 to {vocab_size - 1})",
        "prompt",
    )


def _invalid(message: str, param: str) -> RequestError:
    return RequestError(ErrorCode.INVALID_REQUEST, message, param=param)
