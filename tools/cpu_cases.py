"""What bench_cpu measures, in which order, and what it makes of it. No processes, no tables.

Rounds are interleaved: in each round every case is run by every engine in turn, with prompts of its
own, so that a change of the machine's speed touches all alike. Medians over rounds count.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from cpu_engines import Engine, HttpEngine, Run
from exact_prompts import PromptMaker
from openai_load import Ask, BenchError, Server

Advance = Callable[[str], None]

SETTLE_S = 1.2
"""Engine counters in /metrics are refreshed twice a second."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens, streams and rounds."""

    prompt_tokens: int = 32
    decode_tokens: int = 64
    streams: int = 8
    long_prompt_tokens: int = 500
    step_tokens: int = 200
    rounds: int = 5


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result: a value per engine (median), all values behind it."""

    title: str
    unit: str
    values: dict[str, float]
    rounds: dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Overhead:
    """What the way from the worker to the client adds to a decode step (means over a stream)."""

    gap_ms: float
    step_ms: float

    @property
    def share(self) -> float:
        return (self.gap_ms - self.step_ms) / self.step_ms


def count_runs(sizes: Sizes, num_engines: int) -> int:
    return sizes.rounds * (3 * num_engines + 1)


async def run_rounds(
    engines: Sequence[Engine],
    served: HttpEngine,
    prompts: PromptMaker,
    sizes: Sizes,
    rng: random.Random,
    advance: Advance,
    settle_s: float = SETTLE_S,
) -> tuple[list[Figure], list[Overhead]]:
    """All cases, `sizes.rounds` times. `served` is our server among `engines`."""
    single: dict[str, list[Run]] = {engine.name: [] for engine in engines}
    together: dict[str, list[Run]] = {engine.name: [] for engine in engines}
    cold: dict[str, list[Run]] = {engine.name: [] for engine in engines}
    cached: dict[str, list[Run]] = {e.name: [] for e in engines if isinstance(e, HttpEngine)}
    overheads: list[Overhead] = []
    for number in range(sizes.rounds):
        order = engines if number % 2 == 0 else engines[::-1]
        one = [prompts.make(sizes.prompt_tokens, rng)]
        many = [prompts.make(sizes.prompt_tokens, rng) for _ in range(sizes.streams)]
        long = [prompts.make(sizes.long_prompt_tokens, rng)]
        for engine in order:
            advance(f"{engine.name}: 1 stream")
            single[engine.name].append(await engine.run(one, sizes.decode_tokens))
        for engine in order:
            advance(f"{engine.name}: {sizes.streams} streams")
            together[engine.name].append(await engine.run(many, sizes.decode_tokens))
        for engine in order:
            advance(f"{engine.name}: long prompt")
            cold[engine.name].append(await engine.run(long, 1))
            if engine.name in cached:
                cached[engine.name].append(await engine.run(long, 1))
        advance(f"{served.name}: step time")
        overheads.append(await measure_overhead(served.server, prompts, sizes, rng, settle_s))
    return _figures(single, together, cold, cached, sizes), overheads


def _figures(
    single: dict[str, list[Run]],
    together: dict[str, list[Run]],
    cold: dict[str, list[Run]],
    cached: dict[str, list[Run]],
    sizes: Sizes,
) -> list[Figure]:
    def decode_tps(run: Run) -> float:
        assert run.decode_tps is not None
        return run.decode_tps

    def total_tps(run: Run) -> float:
        return run.total_tps

    def ttft_ms(run: Run) -> float:
        return run.ttft_ms

    streams, length = sizes.streams, sizes.long_prompt_tokens
    return [
        _figure("decode, 1 stream", "tokens/s", single, decode_tps),
        _figure(f"decode, {streams} together", "tokens/s", together, decode_tps),
        _figure(f"whole requests, {streams} together", "tokens/s", together, total_tps),
        _figure(f"TTFT, {length} tokens, fresh", "ms", cold, ttft_ms),
        _figure(f"TTFT, {length} tokens, cached", "ms", cached, ttft_ms),
    ]


def _figure(
    title: str, unit: str, runs: dict[str, list[Run]], value: Callable[[Run], float]
) -> Figure:
    rounds = {name: [value(run) for run in of_engine] for name, of_engine in runs.items()}
    medians = {name: median(values) for name, values in rounds.items()}
    return Figure(title, unit, medians, rounds)


# ---------------------------------------------------------------- worker time against client gap


async def measure_overhead(
    server: Server, prompts: PromptMaker, sizes: Sizes, rng: random.Random, settle_s: float
) -> Overhead:
    """Decode steps of one stream: the worker's own time, and what the client sees.

    The worker's time is the engine's counter of step time in /metrics; a request for one token
    tells what the prompt's step costs, the rest of a long stream's are decode steps.
    """
    first_prompt, prompt = (prompts.make(sizes.prompt_tokens, rng) for _ in range(2))
    first = await _counted(server, first_prompt, 1, settle_s)
    stream = await _counted(server, prompt, sizes.step_tokens, settle_s)
    num_steps = stream.steps - first.steps
    if num_steps < 1:
        raise BenchError(f"{stream.steps:g} steps gave {sizes.step_tokens} tokens: no decode step")
    return Overhead(stream.gap_ms, (stream.step_us - first.step_us) / num_steps / 1e3)


@dataclass(frozen=True, slots=True)
class _Counted:
    steps: float
    step_us: float
    gap_ms: float


async def _counted(server: Server, prompt: str, max_tokens: int, settle_s: float) -> _Counted:
    await asyncio.sleep(settle_s)
    before = read_counters(await server.get_text("/metrics"))
    timing = await server.stream(prompt, Ask(max_tokens=max_tokens))
    await asyncio.sleep(settle_s)
    after = read_counters(await server.get_text("/metrics"))
    gaps = max(1, timing.completion_tokens - 1)
    return _Counted(
        steps=after["steps"] - before["steps"],
        step_us=after["step_us"] - before["step_us"],
        gap_ms=(timing.events_s[-1] - timing.events_s[0]) * 1e3 / gaps,
    )


def read_counters(metrics: str) -> dict[str, float]:
    """`steps` and `step_us` from Prometheus' text; BenchError if they are not there."""
    found = dict(re.findall(r"^freetoken_engine_(steps|step_us)_total (\S+)$", metrics, re.M))
    if len(found) != 2:
        raise BenchError("/metrics has no freetoken_engine_steps_total and _step_us_total")
    return {name: float(value) for name, value in found.items()}
