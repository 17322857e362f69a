"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from freetoken.api.engine import EngineClient
from freetoken.api.http import Exchange
from freetoken.api.served import Served


class ModelsEndpoint:
    """The served names. `max_model_len` is the effective context, null until it is known."""

    def __init__(self, served: Served, engine: EngineClient) -> None:
        self._served = served
        self._engine = engine

    async def list_all(self, exchange: Exchange) -> None:
        models = [self._model(name) for name in self._served.names]
        await exchange.send_json(200, {"object": "list", "data": models})

    async def get_one(self, exchange: Exchange) -> None:
        await exchange.send_json(200, self._model(self._served.check_name(exchange.tail)))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._served.created_s,
            "owned_by": "freetoken",
            "root": self._served.names[0],
            "parent": None,
            "max_model_len": self._engine.context_tokens,
        }
