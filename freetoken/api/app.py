"""The ASGI application: routes, the key, errors as JSON, one log line and metrics per request."""

from __future__ import annotations

import hmac
import time

from freetoken import log
from freetoken.api.engine import EngineClient
from freetoken.api.errors_http import ApiError, to_api_error
from freetoken.api.health import HealthEndpoint
from freetoken.api.http import ClientGone, Exchange, Receive, Router, Scope, Send
from freetoken.api.metrics import Metrics
from freetoken.api.openai_chat import ChatEndpoint
from freetoken.api.openai_completions import CompletionEndpoint
from freetoken.api.openai_models import ModelsEndpoint
from freetoken.api.served import Served

CLIENT_GONE = 499
"""In logs and metrics only: the client left before the answer ended (nginx's number)."""

_log = log.get(__name__)


class App:
    """What uvicorn calls for each request."""

    def __init__(self, served: Served, engine: EngineClient, api_key: str | None) -> None:
        self._api_key = api_key or None
        self._metrics = Metrics(engine)
        self._router = _routes(served, engine, self._metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        exchange = Exchange(scope, receive, send)
        status = CLIENT_GONE
        try:
            await self._handle(exchange)
            status = exchange.status or status
        except ClientGone:
            pass
        finally:
            self._note(exchange, status)

    async def _handle(self, exchange: Exchange) -> None:
        try:
            handler = self._router.find(exchange)
            self._check_key(exchange)
            await handler(exchange)
        except ClientGone:
            raise
        except Exception as error:
            if exchange.status is not None:
                raise  # too late for an answer: the connection is cut
            told = to_api_error(error)
            if told.code == "internal_error":
                _log.error(log.event("http.error", path=exchange.path), exc_info=error)
            exchange.log_fields["error"] = told.code
            await exchange.discard_body()
            await exchange.send_json(told.status, told.body(), told.headers())

    def _check_key(self, exchange: Exchange) -> None:
        if self._api_key is None or not exchange.path.startswith("/v1/"):
            return
        scheme, _, key = (exchange.header("authorization") or "").partition(" ")
        is_right = hmac.compare_digest(key.strip().encode("latin-1"), self._api_key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise ApiError(
                401,
                "a valid API key is needed: send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers=(("www-authenticate", "Bearer"),),
            )

    def _note(self, exchange: Exchange, status: int) -> None:
        now_s = time.monotonic()
        self._metrics.observe(self._router.label(exchange), status, exchange, now_s)
        fields: dict[str, object] = dict(exchange.log_fields)
        fields["status"] = status
        fields["ms"] = (now_s - exchange.started_s) * 1000
        if exchange.first_token_s is not None:
            fields["ttft_ms"] = (exchange.first_token_s - exchange.started_s) * 1000
        if exchange.method == "POST":
            _log.info(log.event("http.end", **fields))
        else:
            _log.debug(log.event("http.end", path=exchange.path, **fields))


def _routes(served: Served, engine: EngineClient, metrics: Metrics) -> Router:
    router = Router()
    models = ModelsEndpoint(served, engine)
    health = HealthEndpoint(engine)
    router.add("POST", "/v1/chat/completions", ChatEndpoint(served, engine))
    router.add("POST", "/v1/completions", CompletionEndpoint(served, engine))
    router.add("GET", "/v1/models", models.list_all)
    router.add("GET", "/v1/models/", models.get_one)
    router.add("GET", "/health", health.ready)
    router.add("GET", "/health/ready", health.ready)
    router.add("GET", "/health/live", health.live)
    router.add("GET", "/version", health.version)
    router.add("GET", "/metrics", metrics)
    return router
