"""What Starlette leaves to us: a limited body, JSON by msgspec, and an end for refused bodies.

Used by the endpoints and app.py; knows nothing of models or engines.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from freetoken.api.errors_http import ApiError, invalid, kind_of

MAX_BODY_BYTES = 32 << 20
"""Room for the longest prompt (2^20 tokens) as text or as token ids in JSON."""

MAX_DISCARD_BYTES = 8 * MAX_BODY_BYTES
"""So much of a refused body is read all the same: many clients look for the answer only after
they have sent everything."""

encode_json = msgspec.json.Encoder().encode


class JsonResponse(Response):
    """Any value that msgspec can encode."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return encode_json(content)


async def read_json(request: Request) -> dict[str, Any]:
    """The body as a JSON object; 400 says what is wrong with it and where."""
    body = await read_body(request)
    if not body.strip():
        raise invalid("the body is empty; send a JSON object", code="invalid_json")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise invalid(f"the body is no valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise invalid("the body is nested too deeply", code="invalid_json") from error
    if not isinstance(value, dict):
        raise invalid(f"the body must be an object, not {kind_of(value)}", code="invalid_json")
    return value


async def read_body(request: Request) -> bytes:
    """The whole body; 413 beyond MAX_BODY_BYTES, announced or real."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit():
        _check_size(int(announced))
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        _check_size(num_bytes)
        parts.append(part)
    return b"".join(parts)


async def discard_body(request: Request) -> bool:
    """Read on without keeping anything, so that a refusal reaches a client that still sends.

    Only while there is something left to read. False if the client may still send more: its
    connection cannot be used again.
    """
    if "expect" in request.headers:
        return False  # it waits for our word and has sent nothing
    num_bytes = 0
    while num_bytes < MAX_DISCARD_BYTES:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body", False):
            return True
    return False


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        raise ApiError(
            413,
            f"the body has {num_bytes} bytes or more, the limit is {MAX_BODY_BYTES}; "
            "send a shorter prompt",
            code="request_too_large",
        )
