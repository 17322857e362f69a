"""What a Submit must satisfy apart from fitting. Plain functions; the api has checked types."""

from __future__ import annotations

from array import array

from freetoken.errors import ErrorCode, RequestError
from freetoken.scheduler.node import TOKEN_BYTES
from freetoken.wire.messages import Submit, unpack_ids

MAX_REQUEST_ID_CHARS = 128


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
    for token_id, _ in submit.sampling.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise _invalid(
                f"logit_bias names token {token_id}, the vocabulary has {vocab_size}", "logit_bias"
            )
    seed = submit.sampling.seed
    if seed is not None and not 0 <= seed < 1 << 63:
        raise _invalid(f"seed is {seed}, it must be in [0, 2**63)", "seed")


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
