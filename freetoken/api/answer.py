"""The way from pieces of text to HTTP: streamed as events or whole, the same for both endpoints.

A `Format` writes the JSON of one endpoint. Headers are sent once the engine has accepted, so a
refusal is a plain error response; what fails later ends the stream with an error event and without
`[DONE]`.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

from freetoken import log
from freetoken.api.choice import Piece
from freetoken.api.errors_http import to_api_error
from freetoken.api.generation import Generation
from freetoken.api.http import ClientGone, Exchange, encode_json
from freetoken.errors import ErrorCode, RequestError

_log = log.get(__name__)


class Format(Protocol):
    """How an endpoint writes its answers. Bytes are whole events, `data: …\\n\\n`."""

    request_id: str
    prompt_field: str  # what an error about the prompt's length is about

    def opening(self, num_choices: int) -> bytes:
        """Events before the first token, if any."""

    def events(self, index: int, piece: Piece) -> bytes:
        """A piece; empty if there is nothing to show."""

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The last event, for clients that asked for usage."""

    def whole(self, choices: list[list[Piece]], usage: dict[str, Any]) -> dict[str, Any]:
        """The response that is not streamed."""


async def answer(
    exchange: Exchange,
    generation: Generation,
    form: Format,
    *,
    is_streaming: bool,
    with_usage: bool,
) -> None:
    """Serve one generation to its end, or to the client's: then the engine is told at once."""
    call = generation.call
    watcher = exchange.watch_disconnect(lambda: call.fail(ClientGone()))
    fields = exchange.log_fields
    fields["id"] = form.request_id
    try:
        try:
            await generation.wait_accepted()
        except RequestError as error:
            if error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED and error.param is None:
                error.param = form.prompt_field
            raise
        if is_streaming:
            await _stream(exchange, generation, form, with_usage)
        else:
            await _send_whole(exchange, generation, form)
    finally:
        watcher.cancel()
        call.close()
        if generation.prompt_tokens:  # it was accepted
            fields["prompt"] = generation.prompt_tokens
            fields["cached"] = generation.usage()["prompt_tokens_details"]["cached_tokens"]
            fields["output"] = sum(choice.num_tokens for choice in generation.choices)
            fields["finish"] = ",".join(choice.finish or "none" for choice in generation.choices)


async def _send_whole(exchange: Exchange, generation: Generation, form: Format) -> None:
    choices: list[list[Piece]] = [[] for _ in generation.choices]
    while pieces := await generation.pieces():
        exchange.mark_first_token()
        for index, piece in pieces:
            choices[index].append(piece)
    body = form.whole(choices, generation.usage())
    await exchange.send_json(200, body, [("x-request-id", form.request_id)])


async def _stream(
    exchange: Exchange, generation: Generation, form: Format, with_usage: bool
) -> None:
    await exchange.start_stream([("x-request-id", form.request_id)])
    try:
        if opening := form.opening(len(generation.choices)):
            await exchange.write(opening)
        while pieces := await generation.pieces():
            exchange.mark_first_token()
            if events := b"".join([form.events(index, piece) for index, piece in pieces]):
                await exchange.write(events)
        last = form.usage_event(generation.usage()) if with_usage else b""
        await exchange.write(last + b"data: [DONE]\n\n")
    except ClientGone:
        raise
    except Exception as error:
        await _write_error(exchange, error)
    await exchange.end_stream()


async def _write_error(exchange: Exchange, error: Exception) -> None:
    told = to_api_error(error)
    if told.code == "internal_error":
        _log.error(log.event("http.error", **exchange.log_fields), exc_info=error)
    exchange.log_fields["error"] = told.code
    await exchange.write(b"data: " + encode_json(told.body()) + b"\n\n")


def event(value: object) -> bytes:
    """One server-sent event with a JSON value."""
    return b"data: " + encode_json(value) + b"\n\n"


def now_s() -> int:
    """OpenAI's `created`: whole seconds since 1970."""
    return int(time.time())
