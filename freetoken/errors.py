"""The exceptions of FreeToken.

    FreeTokenError
    ├── RequestError        fails one request; crosses the wire as `Failed`
    └── EngineError         ends a process; its message is the process's last line
        ├── ConfigError     bad option, file or directory: exit code 2, nothing heavy was started
        └── ProtocolError   a peer speaks another protocol version

Messages give the value, the limit and the remedy. There is nothing in between: an error either
fails one request or ends a process. Rooms have errors of their own that never leave them: WireError
(a frame, dropped), StepError (a step, whose requests fail), ApiError (an HTTP request), ClientError
(a line of `ft chat`).
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Why a request failed; the value is what clients see as `error.code`."""

    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    INVALID_REQUEST = "invalid_request"
    MODEL_NOT_FOUND = "model_not_found"
    QUEUE_FULL = "queue_full"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    STEP_FAILED = "step_failed"


class FreeTokenError(Exception):
    """Anything FreeToken raises on purpose."""


class RequestError(FreeTokenError):
    """One request cannot be served.

    `param` is the request field at fault, `retry_after_s` a hint for codes that pass with time.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class EngineError(FreeTokenError):
    """A process cannot go on; `exit_code` is what it exits with."""

    exit_code = 1


class ConfigError(EngineError):
    """An option, file or directory is unusable; found before anything heavy starts."""

    exit_code = 2


class ProtocolError(EngineError):
    """A peer speaks another version of the wire protocol."""
