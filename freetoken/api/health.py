"""/health/live, /health/ready, /health, /version."""

from __future__ import annotations

import importlib.metadata

from starlette.requests import Request

from freetoken.api.engine import EngineClient
from freetoken.api.http import JsonResponse
from freetoken.api.served import Served
from freetoken.wire.messages import Phase


class HealthEndpoint:
    """Live: this process answers. Ready: the engine serves; else 503 with phase and bytes.

    `context_tokens` is the effective context, null until it is known.
    """

    def __init__(self, served: Served, engine: EngineClient) -> None:
        self._served = served
        self._engine = engine

    async def live(self, request: Request) -> JsonResponse:
        return JsonResponse({"status": "live"})

    async def ready(self, request: Request) -> JsonResponse:
        state = self._engine.state
        is_ready = state.phase is Phase.READY
        body = {
            "status": "ready" if is_ready else "unavailable",
            "model": self._served.names[0],
            "context_tokens": self._engine.context_tokens,
            "phase": state.phase.value,
            "detail": state.detail,
            "loaded_bytes": state.loaded_bytes,
            "total_bytes": state.total_bytes,
            "running": state.running,
            "waiting": state.waiting,
            "given_up_pid": state.given_up_pid,
        }
        if is_ready:
            return JsonResponse(body)
        return JsonResponse(body, 503, {"retry-after": "2"})

    async def version(self, request: Request) -> JsonResponse:
        return JsonResponse({"version": importlib.metadata.version("freetoken")})
