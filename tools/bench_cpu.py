#!/usr/bin/env python3
"""Compare serving the demo on a CPU with transformers' generate, and with llama.cpp's server.

    python tools/bench_cpu.py --threads 2
    python tools/bench_cpu.py --llama-server /path/to/llama-server

All engines run the demo in bf16 on the same cores in one run, in turns. transformers uses whichever
of its experts implementations is fastest here. FreeToken and llama.cpp are measured through HTTP by
the same client. llama.cpp gets the same experts and routers as a GGUF file (tools/make_gguf.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median

from cpu_cases import Figure, Overhead, Sizes, count_runs, run_rounds
from cpu_engines import Engine, TransformersEngine
from cpu_servers import freetoken_server, llama_server
from exact_prompts import find_units
from openai_load import BenchError
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from freetoken.demo.build import ensure_demo
from freetoken.errors import FreeTokenError

TABLE_WIDTH = 110
OURS, REFERENCE = "freetoken", "transformers"


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        figures, overheads, chosen = asyncio.run(bench(options))
    except (BenchError, FreeTokenError) as error:
        print(f"bench_cpu: error: {error}", file=sys.stderr)
        return 1
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    print_result(figures, overheads, chosen, console)
    if options.json:
        result = {
            "threads": options.threads,
            "figures": [asdict(figure) for figure in figures],
            "overheads": [asdict(one) | {"share": one.share} for one in overheads],
            "experts_implementations": chosen,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


async def bench(
    options: argparse.Namespace,
) -> tuple[list[Figure], list[Overhead], dict[str, str]]:
    """(figures, overheads, transformers' experts implementation by case)."""
    sizes = Sizes(
        prompt_tokens=options.prompt_tokens,
        decode_tokens=options.decode_tokens,
        streams=options.streams,
        long_prompt_tokens=options.long_prompt,
        step_tokens=options.step_tokens,
        rounds=options.rounds,
    )
    rng = random.Random(options.seed)
    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    async with AsyncExitStack() as stack:
        stack.enter_context(progress)
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        total = count_runs(sizes, 3 if options.llama_server else 2)
        task = progress.add_task("starting", total=total)
        demo = ensure_demo(report=lambda line: progress.update(task, description=line))
        served = await stack.enter_async_context(
            freetoken_server(
                demo,
                logs / "freetoken.log",
                threads=options.threads,
                options=options.serve_options,
            )
        )
        engines: list[Engine] = [served]
        if options.llama_server:
            context_tokens = sizes.long_prompt_tokens + sizes.prompt_tokens + sizes.decode_tokens
            other = llama_server(
                options.llama_server,
                logs / "llama.log",
                threads=options.threads,
                streams=sizes.streams,
                context_tokens=context_tokens,
            )
            engines.append(await stack.enter_async_context(other))
        reference = TransformersEngine(
            demo, threads=options.threads, implementations=options.experts
        )
        prompts = await find_units(served.server.count_prompt_tokens, rng)
        for engine in [reference, *engines]:
            progress.update(task, description=f"{engine.name}: warm-up")
            await engine.run([prompts.make(sizes.prompt_tokens, rng)], sizes.decode_tokens)
        figures, overheads = await run_rounds(
            [reference, *engines],
            served,
            prompts,
            sizes,
            rng,
            lambda what: progress.update(task, description=what, advance=1),
        )
    return figures, overheads, reference.chosen


def print_result(
    figures: Sequence[Figure],
    overheads: Sequence[Overhead],
    chosen: dict[str, str],
    console: Console,
) -> None:
    """A line per figure; `×` is how many times better FreeToken is than the engine."""
    names = list(figures[0].values)
    others = [name for name in names if name != OURS]
    table = Table(box=SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for column in ["unit", *names, *(f"× {name}" for name in others)]:
        table.add_column(column, justify="right", no_wrap=True)
    for figure in figures:
        values = figure.values
        table.add_row(
            figure.title,
            figure.unit,
            *(f"{values[name]:.3g}" if name in values else "–" for name in names),
            *(_ratio(figure, name) for name in others),
        )
    console.print(table)
    shares = [overhead.share for overhead in overheads]
    steps, gaps = ([getattr(o, field) for o in overheads] for field in ("step_ms", "gap_ms"))
    cold, cached = figures[-2].values[OURS], figures[-1].values[OURS]
    lines = [
        f"decode step {median(steps):.2f} ms in the worker, {median(gaps):.2f} ms at the client: "
        f"{median(shares):+.1%}",
        f"cached over fresh TTFT: {cached / cold:.3f}",
        "transformers' experts: " + ", ".join(f"{case}: {name}" for case, name in chosen.items()),
    ]
    for line in lines:
        console.print(line, highlight=False)


def _ratio(figure: Figure, other: str) -> str:
    if other not in figure.values:
        return "–"
    ratio = figure.values[OURS] / figure.values[other]
    return f"{1 / ratio if figure.unit == 'ms' else ratio:.2f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, default = parser.add_argument, Sizes()
    add("--threads", type=int, default=os.cpu_count(), help="of every engine (default: all cores)")
    add("--rounds", type=int, default=default.rounds, help="medians are over these")
    add("--prompt-tokens", type=int, default=default.prompt_tokens, help="of decode runs")
    add("--decode-tokens", type=int, default=default.decode_tokens, help="of decode runs")
    add("--streams", type=int, default=default.streams, help="decoded together")
    add("--long-prompt", type=int, default=default.long_prompt_tokens, help="tokens, for TTFT")
    add("--step-tokens", type=int, default=default.step_tokens, help="of the step-time stream")
    add("--experts", nargs="+", default=["grouped_mm", "eager"], help="transformers' choices")
    add("--llama-server", type=Path, metavar="PATH", help="compare with this binary, too")
    add("--serve-options", nargs=argparse.REMAINDER, default=[], help="further ones of ft serve")
    add("--seed", type=int, help="of the prompts; default: a new one")
    add("--json", type=Path, metavar="FILE", help="write all values (before --serve-options)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
