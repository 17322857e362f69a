"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from freetoken.api.engine import EngineClient
from freetoken.api.http import JsonResponse
from freetoken.api.served import Served


class ModelsEndpoint:
    """The served names. `max_model_len` is the effective context, null until it is known."""

    def __init__(self, served: Served, engine: EngineClient) -> None:
        self._served = served
        self._engine = engine

    async def list_all(self, request: Request) -> JsonResponse:
        models = [self._model(name) for name in self._served.names]
        return JsonResponse({"object": "list", "data": models})

    async def get_one(self, request: Request) -> JsonResponse:
        return JsonResponse(self._model(self._served.check_name(request.path_params["name"])))

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
