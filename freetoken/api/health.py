"""/health/live, /health/ready, /health, /version."""

from __future__ import annotations

import importlib.metadata

from freetoken.api.engine import EngineClient
from freetoken.api.http import Exchange
from freetoken.wire.messages import Phase


class HealthEndpoint:
    """Live: this process answers. Ready: the engine serves; else 503 with phase and bytes."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    async def live(self, exchange: Exchange) -> None:
        await exchange.send_json(200, {"status": "live"})

    async def ready(self, exchange: Exchange) -> None:
        state = self._engine.state
        is_ready = state.phase is Phase.READY
        await exchange.send_json(
            200 if is_ready else 503,
            {
                "status": "ready" if is_ready else "unavailable",
                "phase": state.phase.value,
                "detail": state.detail,
                "loaded_bytes": state.loaded_bytes,
                "total_bytes": state.total_bytes,
                "running": state.running,
                "waiting": state.waiting,
            },
            None if is_ready else [("retry-after", "2")],
        )

    async def version(self, exchange: Exchange) -> None:
        await exchange.send_json(200, {"version": importlib.metadata.version("freetoken")})
