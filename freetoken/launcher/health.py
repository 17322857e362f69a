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
    """An answer of /health/ready; `context_tokens` is 0 until the worker knows it;
    `given_up_pid`: a process of ours that is of no use any more, 0: none."""

    is_ready: bool
    phase: Phase
    detail: str = ""
    loaded_bytes: int = 0
    total_bytes: int = 0
    context_tokens: int = 0
    model: str = ""
    given_up_pid: int = 0


class HealthPoller:
    """Keeps the latest answer in `latest`; None while nobody answers."""

    def __init__(self, host: str, port: int, *, busy_s: float = 0.1, calm_s: float = 1.0) -> None:
        self.latest: Health | None = None
        self._host = WILDCARDS.get(host, host)
        self._port = port
        self._busy_s = busy_s
        self._calm_s = calm_s
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
        connection = http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", "/health/ready")
            response = connection.getresponse()
            return read_health(response.status, json.loads(response.read()))
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return None
        finally:
            connection.close()


def read_health(status: int, body: Any) -> Health:
    """ValueError, LookupError or TypeError if `body` is no answer of ours."""
    return Health(
        is_ready=status == 200,
        phase=Phase(body["phase"]),
        detail=str(body["detail"]),
        loaded_bytes=int(body["loaded_bytes"]),
        total_bytes=int(body["total_bytes"]),
        context_tokens=int(body["context_tokens"] or 0),
        model=str(body["model"]),
        given_up_pid=int(body["given_up_pid"]),
    )
