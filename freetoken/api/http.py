"""HTTP on bare ASGI: one `Exchange` is a request and its response; `Router` finds its handler.

Bare, because a token's way out must be short: no task, object or validation per chunk. Called by
uvicorn through app.py; knows nothing of models or engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from freetoken.api.errors_http import ApiError, invalid

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY_BYTES = 32 << 20
"""Room for the longest prompt (2^20 tokens) as text or as token ids in JSON."""

MAX_DISCARD_BYTES = 8 * MAX_BODY_BYTES
"""So much of a refused body is read all the same: many clients look for the answer only after
they have sent everything."""

JSON_TYPE = b"application/json"
SSE_TYPE = b"text/event-stream; charset=utf-8"

encode_json = msgspec.json.Encoder().encode


class Exchange:
    """One HTTP request and its response. `status` is None until the response has begun."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.status: int | None = None
        self.tail = ""  # of the path, when the route ends with /
        self.started_s = time.monotonic()
        self.first_token_s: float | None = None
        self.log_fields: dict[str, object] = {}
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._receive = receive
        self._send = send
        self._is_read = False

    def mark_first_token(self) -> None:
        """The first output arrived now (kept if it did before)."""
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()

    def header(self, name: str) -> str | None:
        """The first header of that (lower-case) name."""
        wanted = name.encode()
        for key, value in self._headers:
            if key == wanted:
                return value.decode("latin-1")
        return None

    async def read_body(self) -> bytes:
        """The whole body; 413 beyond MAX_BODY_BYTES, announced or real."""
        announced = self.header("content-length")
        if announced is not None and announced.isdigit():
            _check_size(int(announced))
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part: bytes = message.get("body", b"")
            num_bytes += len(part)
            self._is_read = not message.get("more_body", False)
            _check_size(num_bytes)
            parts.append(part)
            if self._is_read:
                return b"".join(parts)

    async def read_json(self) -> dict[str, Any]:
        """The body as a JSON object; 400 says what is wrong with it and where."""
        body = await self.read_body()
        try:
            value = msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            raise invalid(f"the body is no valid JSON: {error}", code="invalid_json") from error
        except RecursionError as error:
            raise invalid("the body is nested too deeply", code="invalid_json") from error
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise invalid(f"the body must be a JSON object, not a {kind}", code="invalid_json")
        return value

    async def discard_body(self) -> None:
        """Read on without keeping anything, so that a refusal reaches a client that still sends."""
        if self.header("expect") is not None:
            return  # it waits for our word and has sent nothing
        num_bytes = 0
        while not self._is_read and num_bytes < MAX_DISCARD_BYTES:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            num_bytes += len(message.get("body", b""))
            self._is_read = not message.get("more_body", False)

    def watch_disconnect(self, on_gone: Callable[[], None]) -> asyncio.Task[None]:
        """Call `on_gone` once when the client goes away; cancel the task when done.

        Only after the body was read. A complete response counts as gone, too.
        """
        assert self._is_read

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            on_gone()

        return asyncio.create_task(watch())

    async def send_bytes(
        self,
        status: int,
        body: bytes,
        content_type: bytes = JSON_TYPE,
        headers: list[tuple[str, str]] | None = None,
    ) -> None:
        """A whole response."""
        extra = [(name.encode(), value.encode()) for name, value in headers or ()]
        length = (b"content-length", str(len(body)).encode())
        await self._start(status, [(b"content-type", content_type), length, *extra])
        await self._send({"type": "http.response.body", "body": body})

    async def send_json(
        self, status: int, value: object, headers: list[tuple[str, str]] | None = None
    ) -> None:
        await self.send_bytes(status, encode_json(value), JSON_TYPE, headers)

    async def start_stream(self, headers: list[tuple[str, str]] | None = None) -> None:
        """Headers of a server-sent event stream; `write` the events, then `end_stream`."""
        extra = [(name.encode(), value.encode()) for name, value in headers or ()]
        await self._start(
            200,
            [
                (b"content-type", SSE_TYPE),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # nginx would hold events back
                *extra,
            ],
        )

    async def write(self, chunk: bytes) -> None:
        """Part of a stream; waits while the client reads slower than we write."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end_stream(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        if not self._is_read and self.method == "POST":
            # What is left of the body will not be read: the connection cannot be used again.
            headers.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


class ClientGone(Exception):  # noqa: N818 - an event, not an error
    """The client closed the connection; nobody is left to answer."""


Handler = Callable[[Exchange], Awaitable[None]]


class Router:
    """Paths to handlers. A path that ends with / takes everything below it as `tail`."""

    def __init__(self) -> None:
        self._exact: dict[str, dict[str, Handler]] = {}
        self._below: dict[str, dict[str, Handler]] = {}

    def add(self, method: str, path: str, handler: Handler) -> None:
        table = self._below if path.endswith("/") else self._exact
        table.setdefault(path, {})[method] = handler

    def find(self, exchange: Exchange) -> Handler:
        """The handler; 404 names the path, 405 the methods that would do."""
        methods = self._exact.get(exchange.path) or self._find_below(exchange)
        if methods is None:
            known = ", ".join(sorted([*self._exact, *(f"{path}…" for path in self._below)]))
            raise ApiError(404, f"no such path: {exchange.path}; there are {known}")
        wanted = "GET" if exchange.method == "HEAD" else exchange.method
        handler = methods.get(wanted)
        if handler is None:
            allowed = ", ".join(sorted(methods))
            raise ApiError(
                405,
                f"{exchange.path} does not take {exchange.method}; use {allowed}",
                code="method_not_allowed",
                headers=(("allow", allowed),),
            )
        return handler

    def label(self, exchange: Exchange) -> str:
        """The route's path, for metrics: a closed set whatever clients ask for."""
        if exchange.path in self._exact:
            return exchange.path
        return next((path for path in self._below if exchange.path.startswith(path)), "other")

    def _find_below(self, exchange: Exchange) -> dict[str, Handler] | None:
        for path, methods in self._below.items():
            if exchange.path.startswith(path) and len(exchange.path) > len(path):
                exchange.tail = exchange.path[len(path) :]
                return methods
        return None


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        raise ApiError(
            413,
            f"the body has {num_bytes} bytes or more, the limit is {MAX_BODY_BYTES}; "
            "send a shorter prompt",
            code="request_too_large",
        )
