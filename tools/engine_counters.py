"""What FreeToken's engine says in /metrics that a measurement has cost: experts, bytes, steps.

Other servers have no such figures; then there is None everywhere.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, fields

from openai_load import BenchError, Server

SETTLE_S = 0.6
"""The engine's totals reach /metrics twice a second."""
_TOTAL = re.compile(r"^freetoken_engine_(\w+?)_total (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class EngineWork:
    """Totals, or what came between two of them. The names are those in /metrics.

    steps_pass, step_us_pass, expert_bytes_pass, distinct_experts_pass: the part of steps, step_us,
    expert_bytes, distinct_experts that passes had · distinct_experts, slot_hits, slot_misses:
    summed over layers and steps.
    """

    steps: float
    steps_pass: float
    step_us: float
    step_us_pass: float
    slot_hits: float
    slot_misses: float
    expert_bytes: float
    expert_bytes_pass: float
    distinct_experts: float
    distinct_experts_pass: float

    def since(self, before: EngineWork) -> EngineWork:
        names = [field.name for field in fields(self)]
        return EngineWork(*(getattr(self, name) - getattr(before, name) for name in names))

    @property
    def miss_rate(self) -> float:
        """Of the distinct experts that steps looked up."""
        looked_up = self.slot_hits + self.slot_misses
        return self.slot_misses / looked_up if looked_up else 0.0


async def read_totals(server: Server) -> EngineWork | None:
    """The totals now; None if the server does not tell them."""
    try:
        text = await server.get_text("/metrics")
    except BenchError:
        return None
    found = {name: float(value) for name, value in _TOTAL.findall(text)}
    names = [field.name for field in fields(EngineWork)]
    if not found.keys() >= set(names):
        return None
    return EngineWork(*(found[name] for name in names))


class Meter:
    """Reads what happens between `start` and `stop`. `learn` first."""

    def __init__(self, server: Server, settle_s: float = SETTLE_S) -> None:
        self._server = server
        self._settle_s = settle_s
        self._before: EngineWork | None = None
        self.is_available = False

    async def learn(self) -> None:
        self.is_available = await read_totals(self._server) is not None

    async def start(self) -> None:
        """The server must be idle."""
        self._before = await self._read()

    async def stop(self) -> EngineWork | None:
        """The server must be idle again."""
        after = await self._read()
        return None if self._before is None or after is None else after.since(self._before)

    async def _read(self) -> EngineWork | None:
        if not self.is_available:
            return None
        await asyncio.sleep(self._settle_s)
        return await read_totals(self._server)
