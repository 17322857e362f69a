#!/usr/bin/env python3
"""Measure an OpenAI-compatible server: time to first token, prefix hits, decode speed.

    python tools/bench_serve.py --url http://127.0.0.1:1919

Works against FreeToken, vLLM, SGLang and llama.cpp's server. It measures

  fresh    TTFT of prompts never seen before, by length
  extend   TTFT of a prompt the server has just seen plus k more tokens, by k
  decode   gap between tokens of a stream, and tokens/s of all, by concurrency and temperature

Every repetition uses prompts of its own, so nothing is cached by accident. Where /metrics tells
what the engine did, as FreeToken's does, experts and misses stand beside each figure. Medians go to
stdout as tables, everything to --json FILE, progress to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from bench_report import print_tables, to_json
from bench_scenarios import Plan, Results, count_requests, run_plan
from openai_load import BenchError, Server, add_server_options
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

TABLE_WIDTH = 120


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    plan = Plan(
        lengths=tuple(options.lengths),
        extends=tuple(options.extends),
        prefix_tokens=options.prefix,
        concurrency=tuple(options.concurrency),
        temperatures=tuple(options.temperature),
        decode_prompt_tokens=options.decode_prompt,
        max_tokens=options.max_tokens,
        repeats=options.repeats,
        seed=options.seed if options.seed is not None else secrets.randbits(32),
    )
    server = Server(
        options.url,
        model=options.model,
        api_key=options.api_key,
        is_chat=options.endpoint == "chat",
        timeout_s=options.timeout,
    )
    try:
        results = asyncio.run(bench(server, plan))
    except BenchError as error:
        print(f"bench_serve: error: {error}", file=sys.stderr)
        return 1
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)  # files and pipes have no width
    print_tables(results, console)
    if options.json:
        options.json.write_text(json.dumps(to_json(results), indent=1) + "\n")
    return 0


async def bench(server: Server, plan: Plan) -> Results:
    """Run `plan` against `server` with a progress bar on stderr."""
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("calibrating", total=count_requests(plan))

        def advance(what: str, requests: int) -> None:
            progress.update(task, advance=requests, description=what)

        async with server:
            return await run_plan(server, plan, random.Random(plan.seed), advance)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_options(parser)
    add = parser.add_argument
    add("--endpoint", choices=("completions", "chat"), default="completions")
    add("--lengths", type=_count, nargs="*", default=[128, 512, 2048], metavar="TOKENS")
    add("--extends", type=_count, nargs="*", default=[1, 16, 64, 256], metavar="TOKENS")
    add("--prefix", type=_count, default=512, metavar="TOKENS", help="cached before an extend")
    add("--concurrency", type=_count, nargs="*", default=[1, 4, 8], metavar="STREAMS")
    add("--temperature", type=float, nargs="*", default=[0.0, 1.0])
    add("--decode-prompt", type=_count, default=64, metavar="TOKENS", help="of decode streams")
    add("--max-tokens", type=_count, default=128, help="tokens of a decode stream")
    add("--repeats", type=_count, default=3, help="of each measurement; medians are shown")
    add("--seed", type=int, help="of the prompts; default: a new one, so that none is cached")
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds of silence at most")
    add("--json", type=Path, metavar="FILE", help="write all measurements")
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
