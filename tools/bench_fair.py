#!/usr/bin/env python3
"""Measure how fair a server is: a stream decodes, a very long prompt arrives, then a short one.

    python tools/bench_fair.py --url http://127.0.0.1:1919 --long 32768

First each alone, then together. Told: the stream's longest gap while the long prompt is read, when
the two prompts get their first tokens, and how long the three would have taken one after the other
compared with how long they took together (below 1, fairness costs throughput). Works against any
OpenAI-compatible server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from exact_prompts import PromptMaker, find_units
from openai_load import Ask, BenchError, Server, Timing, add_server_options

WARM_TOKENS = 64


@dataclass(frozen=True, slots=True)
class FairPlan:
    """stream_tokens: as many as the stream needs to outlast the long prompt · start_s: from the
    stream's request to the long prompt · late_s: from there to the short one."""

    long_tokens: int
    short_tokens: int = 10
    stream_tokens: int = 512
    start_s: float = 0.5
    late_s: float = 0.1
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class Fairness:
    """Milliseconds; of one repetition. *_alone: with nothing beside it.

    gap, gap_p50: the longest and the median gap of the stream while the long prompt was read ·
    during: tokens that the stream got in that time · short_first: the short prompt got its first
    token before the long one · share: what the same work takes one after the other ÷ together.
    """

    long_tokens: int
    long_alone_ms: float
    short_alone_ms: float
    gap_alone_ms: float
    long_ms: float
    short_ms: float
    gap_ms: float
    gap_p50_ms: float
    during: int
    short_first: bool
    share: float


async def measure(server: Server, plan: FairPlan, rng: random.Random) -> list[Fairness]:
    """One value per repetition. BenchError if the stream ends before the long prompt is read."""
    await server.learn()
    await server.drop_unsupported()
    prompts = await find_units(server.count_prompt_tokens, rng)
    await _alone(server, prompts, plan, rng)  # the first of its size may compile or allocate
    return [await _repeat(server, prompts, plan, rng) for _ in range(plan.repeats)]


async def _alone(
    server: Server, prompts: PromptMaker, plan: FairPlan, rng: random.Random
) -> tuple[Timing, Timing, Timing]:
    """(long, short, stream)"""
    long = await server.stream(prompts.make(plan.long_tokens, rng), Ask(1))
    short = await server.stream(prompts.make(plan.short_tokens, rng), Ask(1))
    stream = await server.stream(prompts.make(WARM_TOKENS, rng), Ask(WARM_TOKENS))
    return long, short, stream


async def _repeat(
    server: Server, prompts: PromptMaker, plan: FairPlan, rng: random.Random
) -> Fairness:
    alone = await _alone(server, prompts, plan, rng)
    sizes = (WARM_TOKENS, plan.long_tokens, plan.short_tokens)
    made = [prompts.make(size, rng) for size in sizes]
    asks = (Ask(plan.stream_tokens), Ask(1), Ask(1))
    waits_s = (plan.start_s, plan.late_s, 0.0)
    tasks = []
    for prompt, ask, wait_s in zip(made, asks, waits_s, strict=True):
        tasks.append(asyncio.create_task(server.stream(prompt, ask)))
        await asyncio.sleep(wait_s)
    stream, long, short = await asyncio.gather(*tasks)
    return judge(plan.long_tokens, alone, long, short, stream)


def judge(
    long_tokens: int,
    alone: tuple[Timing, Timing, Timing],
    long: Timing,
    short: Timing,
    stream: Timing,
) -> Fairness:
    """From what was timed; the three of `alone` are long, short and stream."""
    start_s, end_s = long.sent_s, long.events_s[0]
    if not stream.events_s[0] <= start_s < end_s <= stream.events_s[-1]:
        raise BenchError(
            f"the stream of {stream.completion_tokens} tokens did not decode while the long prompt "
            "was read; raise --stream-tokens, or --start if it began too late"
        )
    # With the gap that the prompt's arrival falls in, and the one after its end.
    before = max(at_s for at_s in stream.events_s if at_s <= start_s)
    after = min(at_s for at_s in stream.events_s if at_s >= end_s)
    events = [at_s for at_s in stream.events_s if before <= at_s <= after]
    gaps = [(b - a) * 1e3 for a, b in pairwise(events)]
    during = sum(start_s < at_s <= end_s for at_s in events)
    long_alone, short_alone, stream_alone = alone
    gap_alone = median((b - a) * 1e3 for a, b in pairwise(stream_alone.events_s))
    serial = long_alone.ttft_ms + during * gap_alone
    if short.events_s[0] <= end_s:
        serial += short_alone.ttft_ms
    return Fairness(
        long_tokens=long_tokens,
        long_alone_ms=long_alone.ttft_ms,
        short_alone_ms=short_alone.ttft_ms,
        gap_alone_ms=gap_alone,
        long_ms=long.ttft_ms,
        short_ms=short.ttft_ms,
        gap_ms=max(gaps),
        gap_p50_ms=median(gaps),
        during=during,
        short_first=short.events_s[0] < end_s,
        share=serial / long.ttft_ms,
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    plan = FairPlan(
        options.long,
        options.short,
        options.stream_tokens,
        options.start,
        options.late,
        options.repeats,
    )
    server = Server(options.url, model=options.model, api_key=options.api_key)

    async def run() -> list[Fairness]:
        async with server:
            return await measure(server, plan, random.Random(secrets.randbits(32)))

    try:
        results = asyncio.run(run())
    except BenchError as error:
        print(f"bench_fair: error: {error}", file=sys.stderr)
        return 1
    print(show(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results]) + "\n")
    return 0


def show(results: Sequence[Fairness]) -> str:
    """Medians, but the longest of the gaps."""

    def middle(name: str) -> float:
        return median(float(getattr(result, name)) for result in results)

    first = sum(result.short_first for result in results)
    return (
        f"prompt of {results[0].long_tokens} beside a stream: {middle('long_ms'):.0f} ms "
        f"(alone {middle('long_alone_ms'):.0f}); stream: longest gap "
        f"{max(result.gap_ms for result in results):.0f} ms, median {middle('gap_p50_ms'):.1f} "
        f"(alone {middle('gap_alone_ms'):.1f}), {middle('during'):.0f} tokens meanwhile; "
        f"short prompt {middle('short_ms'):.0f} ms (alone {middle('short_alone_ms'):.0f}), first "
        f"in {first} of {len(results)}; one after the other ÷ together {middle('share'):.2f}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_options(parser)
    add = parser.add_argument
    add("--long", type=int, default=8192, metavar="TOKENS", help="of the long prompt")
    add("--short", type=int, default=10, metavar="TOKENS", help="of the short prompt")
    add("--stream-tokens", type=int, default=512, metavar="N", help="that the stream asks for")
    add("--start", type=float, default=0.5, metavar="S", help="from stream to long prompt")
    add("--late", type=float, default=0.1, metavar="S", help="from long to short prompt")
    add("--repeats", type=int, default=3)
    add("--json", type=Path, metavar="FILE", help="write all measurements")
    return parser


if __name__ == "__main__":
    sys.exit(main())
