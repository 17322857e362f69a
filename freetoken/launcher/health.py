"""How the server is, asked over HTTP as a client would: GET /health/ready, from a thread."""

from __future__ import annotations

import http.client
import json
import threading
from dataclasses import dataclass
from typing import Any

from freetoken.wire.messages import Phase

WILDCARDS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Health:
    """An answer of /health/ready; once ready, model and context are those of /v1/models."""

    is_ready: bool
    phase: Phase
    detail: str = ""
    loaded_bytes: int = 0
    total_bytes: int = 0
    context_tokens: int = 0
    model: str = ""


class HealthPoller:
    """Keeps the latest answer in `latest`; None while nobody answers."""

    def __init__(
        self, host: str, port: int, api_key: str | None, *, busy_s: float = 0.1, calm_s: float = 1.0
    ) -> None:
        self.latest: Health | None = None
        self._host = WILDCARDS.get(host, host)
        self._port = port
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._busy_s = busy_s
        self._calm_s = calm_s
        self._model = ("", 0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Does not wait for an answer that is outstanding."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.latest = self._ask()
            is_calm = self.latest is not None and self.latest.is_ready
            self._stopping.wait(self._calm_s if is_calm else self._busy_s)

    def _ask(self) -> Health | None:
        try:
            status, body = self._get("/health/ready")
            if status == 200 and not self._model[0]:
                _, models = self._get("/v1/models")
                self._model = read_model(models)
            return read_health(status, body, *self._model)
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return None

    def _get(self, path: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", path, headers=self._headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()


def read_model(body: Any) -> tuple[str, int]:
    """Name and effective context of the first model of /v1/models; raises as `read_health`."""
    first = body["data"][0]
    return str(first["id"]), int(first["max_model_len"])


def read_health(status: int, body: Any, model: str = "", context_tokens: int = 0) -> Health:
    """ValueError, LookupError or TypeError if `body` is no answer of ours."""
    return Health(
        is_ready=status == 200,
        phase=Phase(body["phase"]),
        detail=str(body.get("detail", "")),
        loaded_bytes=int(body.get("loaded_bytes", 0)),
        total_bytes=int(body.get("total_bytes", 0)),
        context_tokens=context_tokens,
        model=model,
    )
