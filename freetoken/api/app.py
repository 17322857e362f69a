"""The ASGI application: routes, the key, and errors in OpenAI's shape. Starlette does the rest.

From the outside in: `Recorder` (log line and metrics), errors to responses, the key, routes.
"""

from __future__ import annotations

import hmac

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from freetoken import log
from freetoken.api.engine import EngineClient
from freetoken.api.errors_http import ApiError, to_api_error
from freetoken.api.health import HealthEndpoint
from freetoken.api.http import JsonResponse, discard_body
from freetoken.api.metrics import Metrics
from freetoken.api.openai_chat import ChatEndpoint
from freetoken.api.openai_completions import CompletionEndpoint
from freetoken.api.openai_models import ModelsEndpoint
from freetoken.api.record import Recorder, record_of
from freetoken.api.served import Served

_log = log.get(__name__)


def build_app(served: Served, engine: EngineClient, api_key: str | None) -> Starlette:
    """What uvicorn calls for each request."""
    metrics = Metrics(engine)
    routes = _routes(served, engine, metrics)
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Recorder, metrics, routes),
            # Not an exception_handler of Starlette's: for Exception it would raise again after the
            # answer, and the connection would be cut under the client's next request.
            Middleware(ExceptionMiddleware, handlers={Exception: refuse}),
            *([Middleware(KeyCheck, api_key)] if api_key else ()),
        ],
        exception_handlers={HTTPException: refuse},
    )
    app.router.redirect_slashes = False  # a wrong path is told, not guessed
    return app


class KeyCheck:
    """Lets nothing below /v1 pass without the key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/v1/"):
            self._check(Request(scope))
        await self._app(scope, receive, send)

    def _check(self, request: Request) -> None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(key.strip().encode("latin-1"), self._api_key)
        if scheme.lower() != "bearer" or not is_right:
            raise ApiError(
                401,
                "a valid API key is needed: send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers=(("www-authenticate", "Bearer"),),
            )


async def refuse(request: Request, error: Exception) -> Response:
    """The response for what an endpoint raised; what is no refusal is logged, too."""
    if isinstance(error, ClientDisconnect):
        raise error
    if isinstance(error, HTTPException):
        error = _route_error(request, error)
    told = to_api_error(error)
    record = record_of(request.scope)
    if told.code == "internal_error":
        _log.error(log.event("http.error", path=request.scope["path"]), exc_info=error)
    record.fields["error"] = told.code
    headers = told.headers()
    if not record.is_body_read and not await discard_body(request):
        headers["connection"] = "close"
    return JsonResponse(told.body(), told.status, headers)


def _route_error(request: Request, error: HTTPException) -> ApiError:
    """What the router raises: 404 names the paths there are, 405 the methods that would do."""
    path = request.scope["path"]
    if error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        return ApiError(
            405,
            f"{path} does not take {request.method}; use {allowed}",
            code="method_not_allowed",
            headers=(("allow", allowed),),
        )
    routes = request.app.routes
    known = ", ".join(sorted(route.path_format for route in routes if isinstance(route, Route)))
    return ApiError(error.status_code, f"no such path: {path}; there are {known}")


def _routes(served: Served, engine: EngineClient, metrics: Metrics) -> list[Route]:
    chat = ChatEndpoint(served, engine)
    completion = CompletionEndpoint(served, engine)
    models = ModelsEndpoint(served, engine)
    health = HealthEndpoint(served, engine)
    return [
        Route("/v1/chat/completions", chat.create, methods=["POST"]),
        Route("/v1/completions", completion.create, methods=["POST"]),
        Route("/v1/models", models.list_all),
        Route("/v1/models/{name:path}", models.get_one),
        Route("/health", health.ready),
        Route("/health/ready", health.ready),
        Route("/health/live", health.live),
        Route("/version", health.version),
        Route("/metrics", metrics.show),
    ]
