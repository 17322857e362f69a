"""The way from pieces of text to HTTP: streamed as events or whole, the same for both endpoints.

A `Format` writes the JSON of one endpoint. Headers are sent once the engine has accepted, so a
refusal is a plain error response; what fails later ends the stream with an error event and without
`[DONE]`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from freetoken import log
from freetoken.api.calls import Call
from freetoken.api.choice import Piece
from freetoken.api.errors_http import to_api_error
from freetoken.api.generation import Generation
from freetoken.api.http import JsonResponse, encode_json
from freetoken.api.record import Record, record_of
from freetoken.errors import ErrorCode, RequestError

_STREAM_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold events back
}

_log = log.get(__name__)


class Format(Protocol):
    """How an endpoint writes its answers. Bytes are whole events, `data: …\\n\\n`."""

    request_id: str
    prompt_field: str  # what an error about the prompt's length is about
    with_usage: bool  # a stream ends with `usage_event`

    def opening(self, num_choices: int) -> bytes:
        """Events before the first token, if any."""

    def events(self, index: int, piece: Piece) -> bytes:
        """A piece; empty if there is nothing to show."""

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The last event, for clients that asked for usage."""

    def whole(self, choices: list[list[Piece]], usage: dict[str, Any]) -> dict[str, Any]:
        """The response that is not streamed."""


class Answer:
    """Serves one generation to its end, or to the client's: then the engine is told at once.

    An ASGI application, as Starlette's responses are: an endpoint returns one.
    """

    def __init__(self, generation: Generation, form: Format, *, is_streaming: bool) -> None:
        self._generation = generation
        self._form = form
        self._is_streaming = is_streaming
        self._headers = {"x-request-id": form.request_id}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._generation.call
        record = record_of(scope)
        record.fields["id"] = self._form.request_id
        watcher = asyncio.create_task(_watch_disconnect(receive, call))
        try:
            await self._wait_accepted()
            if self._is_streaming:
                events = _events(self._generation, self._form, record)
                stream = _EventStream(events, headers={**_STREAM_HEADERS, **self._headers})
                await stream(scope, receive, send)
            else:
                body = await _whole(self._generation, self._form, record)
                await JsonResponse(body, headers=self._headers)(scope, receive, send)
        except ClientDisconnect:
            pass  # nobody is left to answer
        finally:
            watcher.cancel()
            call.close()
            self._note(record)

    async def _wait_accepted(self) -> None:
        try:
            await self._generation.wait_accepted()
        except RequestError as error:
            if error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED and error.param is None:
                error.param = self._form.prompt_field
            raise

    def _note(self, record: Record) -> None:
        generation = self._generation
        if generation.prompt_tokens:  # it was accepted
            usage = generation.usage()
            record.fields["prompt"] = generation.prompt_tokens
            record.fields["cached"] = usage["prompt_tokens_details"]["cached_tokens"]
            record.fields["output"] = usage["completion_tokens"]
            finishes = (choice.finish or "none" for choice in generation.choices)
            record.fields["finish"] = ",".join(finishes)


class _EventStream(StreamingResponse):
    """Server-sent events, one write for each item.

    Starlette's own __call__ would listen for the client's leaving a second time, or not at all
    (ASGI 2.4: then a client that leaves before its first token is noticed with that token only).
    """

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.stream_response(send)
        except OSError as error:  # how ASGI 2.4 says that the client is gone
            raise ClientDisconnect from error


async def _watch_disconnect(receive: Receive, call: Call) -> None:
    """Fail the call when the client goes away, which wakes whoever waits for its tokens."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call.fail(ClientDisconnect())


async def _whole(generation: Generation, form: Format, record: Record) -> dict[str, Any]:
    choices: list[list[Piece]] = [[] for _ in generation.choices]
    while pieces := await generation.pieces():
        record.mark_first_token()
        for index, piece in pieces:
            choices[index].append(piece)
    return form.whole(choices, generation.usage())


async def _events(generation: Generation, form: Format, record: Record) -> AsyncIterator[bytes]:
    try:
        if opening := form.opening(len(generation.choices)):
            yield opening
        while pieces := await generation.pieces():
            record.mark_first_token()
            if events := b"".join([form.events(index, piece) for index, piece in pieces]):
                yield events
        last = form.usage_event(generation.usage()) if form.with_usage else b""
        yield last + b"data: [DONE]\n\n"
    except ClientDisconnect:
        raise
    except Exception as error:
        told = to_api_error(error)
        if told.code == "internal_error":
            _log.error(log.event("http.error", **record.fields), exc_info=error)
        record.fields["error"] = told.code
        yield event(told.body())


def event(value: object) -> bytes:
    """One server-sent event with a JSON value."""
    return b"data: " + encode_json(value) + b"\n\n"


def now_s() -> int:
    """OpenAI's `created`: whole seconds since 1970."""
    return int(time.time())
