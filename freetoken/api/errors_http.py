"""Errors as HTTP clients see them: a status and OpenAI's error object.

Everything the api refuses becomes an `ApiError`; `to_api_error` translates what comes from the
engine. Knows nothing of requests or sockets.
"""

from __future__ import annotations

import math
from typing import Any

from freetoken.errors import ErrorCode, FreeTokenError, RequestError

_STATUS = {
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: 400,
    ErrorCode.INVALID_REQUEST: 400,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.QUEUE_FULL: 429,
    ErrorCode.STEP_FAILED: 500,
    ErrorCode.ENGINE_UNAVAILABLE: 503,
}
_TYPE = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
_RETRY_AFTER_S = {429: 1.0, 503: 2.0}
"""What Retry-After says when the engine gives no better hint."""


class ApiError(FreeTokenError):
    """One HTTP request is answered with `status` and this error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s or _RETRY_AFTER_S.get(status)
        self._headers = headers

    @property
    def type(self) -> str:
        return _TYPE.get(self.status) or (
            "server_error" if self.status >= 500 else "invalid_request_error"
        )

    def headers(self) -> dict[str, str]:
        """Headers beyond the content's own; Retry-After in whole seconds (RFC 9110, 10.2.3)."""
        extra = dict(self._headers)
        if self.retry_after_s is not None:
            extra["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return extra

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


def kind_of(value: object) -> str:
    """What a decoded JSON value is, with its article: `an object`, `a number`, `null`."""
    kinds = ((bool, "a boolean"), (str, "a string"), (int | float, "a number"), (list, "an array"))
    return next(
        (kind for types, kind in kinds if isinstance(value, types)),
        "null" if value is None else "an object",
    )


def invalid(message: str, param: str | None = None, *, code: str = "invalid_request") -> ApiError:
    """A 400 about the field `param`."""
    return ApiError(400, message, code=code, param=param)


def to_api_error(error: Exception) -> ApiError:
    """What a client is told about `error`; an unknown one is a 500 that says no more than that."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(
            _STATUS[error.code],
            error.message,
            code=error.code.value,
            param=error.param,
            retry_after_s=error.retry_after_s,
        )
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")
