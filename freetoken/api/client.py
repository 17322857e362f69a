"""A small client for any OpenAI-compatible server: model names, and chats streamed as text.

Called by `ft chat`. Every failure is a `ClientError` whose message fits on one line.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from freetoken.errors import FreeTokenError

CONNECT_S = 10.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Message = dict[str, str]


class ClientError(FreeTokenError):
    """The server cannot be reached, refused, or broke off."""


class ChatClient:
    """One server. `url` with or without its /v1."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        base = url.rstrip("/").removesuffix("/v1")
        parts = urlsplit(base)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ClientError(f"{url!r} is no URL; give one like http://127.0.0.1:1919")
        self.url = base
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            base_url=f"{base}/v1",
            headers=headers,
            timeout=httpx.Timeout(CONNECT_S, read=None),  # a long prompt may take minutes
            trust_env=parts.hostname not in LOOPBACK,  # no proxy on the way to ourselves
            verify=parts.scheme == "https",  # loading certificates takes its time
        )

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Names that the server offers."""
        try:
            response = self._http.get("/models")
            _check(response)
            return [str(model["id"]) for model in response.json()["data"]]
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        except (ValueError, LookupError, TypeError) as error:
            raise ClientError(f"{self.url}/v1/models is no list of models") from error

    def chat(
        self, model: str, messages: Sequence[Message], options: dict[str, Any]
    ) -> Generator[str, None, None]:
        """The answer, piece by piece. Closing the iterator stops the answer at the server, too."""
        body = {"model": model, "messages": list(messages), "stream": True, **options}
        try:
            with self._http.stream("POST", "/chat/completions", json=body) as response:
                if response.is_error:
                    response.read()
                _check(response)
                yield from _texts(response.iter_lines())
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: httpx.HTTPError) -> ClientError:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ClientError(
                f"cannot reach {self.url}: {_one_line(str(error))}; "
                "is a server running there? ('ft serve' starts one, --url says where it is)"
            )
        return ClientError(f"{self.url} broke off: {_one_line(str(error)) or type(error).__name__}")


def _texts(lines: Iterator[str]) -> Iterator[str]:
    """The text in a stream of events; ends with [DONE]."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise ClientError(f"the server sent an event that is no JSON: {data[:80]}") from error
        if not isinstance(event, dict):
            continue
        if event.get("error"):
            raise ClientError(_error_text(event) or "the server reported an error")
        for choice in event.get("choices") or ():
            if text := (choice.get("delta") or {}).get("content"):
                yield text
    raise ClientError("the server ended the answer before its end")


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        told = _error_text(response.json())
    except ValueError:
        told = None
    told = told or _one_line(response.text)[:200] or response.reason_phrase
    raise ClientError(f"the server answers {response.status_code}: {told}")


def _error_text(body: object) -> str | None:
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        error = error.get("message")
    return _one_line(error) if isinstance(error, str) else None


def _one_line(text: str) -> str:
    return " ".join(text.split())
