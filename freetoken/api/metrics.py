"""/metrics in Prometheus' text format: HTTP figures of this process, counters of the engine."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from freetoken.api.engine import EngineClient
from freetoken.wire.messages import Phase

ENGINE_GAUGES = frozenset({"pages_free", "pages_cached", "pages_used", "running", "waiting"})
"""Keys of EngineState.counters that rise and fall. Twin: GAUGES in scheduler/counters.py."""

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """A registry of its own, so that nothing is global."""

    def __init__(self, engine: EngineClient) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineFigures(engine))
        self._requests = Counter(
            "freetoken_http_requests",
            "HTTP requests answered",
            ("path", "status"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "freetoken_http_request_seconds",
            "Time from the request to the end of its response",
            ("path",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._ttft = Histogram(
            "freetoken_time_to_first_token_seconds",
            "Time from the request to its first output token",
            buckets=_SECONDS,
            registry=self._registry,
        )

    def observe(self, path: str, status: int, duration_s: float, ttft_s: float | None) -> None:
        """Count a request that has ended."""
        self._requests.labels(path, status).inc()
        self._seconds.labels(path).observe(duration_s)
        if ttft_s is not None:
            self._ttft.observe(ttft_s)

    async def show(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


class _EngineFigures(Collector):
    """What the scheduler told last, read when somebody asks."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        state = self._engine.state
        gauges = {
            "ready": ("1 if the engine serves", state.phase is Phase.READY),
            "running_requests": ("Requests that run", state.running),
            "waiting_requests": ("Requests that wait", state.waiting),
            "open_sequences": ("Sequences of this api process", self._engine.num_open),
            "context_tokens": ("Tokens that one request may use", state.context_tokens),
            "loaded_bytes": ("Bytes of the model loaded", state.loaded_bytes),
            "malformed_frames": ("Frames dropped by this process", self._engine.num_malformed),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"freetoken_{name}", text, float(value))
        for name, total in sorted(state.counters.items()):
            clean = re.sub(r"[^a-zA-Z0-9_]", "_", name).removesuffix("_total")
            if name in ENGINE_GAUGES:
                yield GaugeMetricFamily(f"freetoken_engine_{clean}", "Of the engine, now", total)
            else:
                yield CounterMetricFamily(f"freetoken_engine_{clean}", "Of the engine", total)
