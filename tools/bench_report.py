"""Results of bench_serve as tables for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from bench_scenarios import FirstToken, Results
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def print_tables(results: Results, console: Console) -> None:
    console.print(
        f"{results.model} at {results.url}, medians of {results.plan.repeats}, "
        f"prompts from seed {results.plan.seed}",
        highlight=False,
        soft_wrap=True,
    )
    for note in results.notes:
        console.print(f"note: {note}", highlight=False, soft_wrap=True)
    if results.fresh:
        title = "Fresh prompts"
        console.print(_first_token_table(title, "prompt tokens", results.fresh))
    if results.extend:
        title = f"Extends of {results.plan.prefix_tokens} cached tokens"
        console.print(_first_token_table(title, "new tokens", results.extend))
    if results.decode:
        console.print(_decode_table(results))


def to_json(results: Results) -> dict[str, Any]:
    """Every value of every repetition, medians beside them."""
    raw = asdict(results)
    raw["prompts"] = {
        "tokens_per_unit": results.prompts.tokens_per_unit,
        "overhead_tokens": results.prompts.overhead,
    }
    for section in ("fresh", "extend", "decode"):
        for row in raw[section]:
            row["median"] = {
                name: median(values)
                for name, values in row.items()
                if isinstance(values, Sequence) and None not in values
            }
    return raw


def _first_token_table(title: str, column: str, rows: Sequence[FirstToken]) -> Table:
    table = _table(title, column, "sent", "cached", "TTFT ms", "least", "most")
    for row in rows:
        table.add_row(
            str(row.tokens),
            f"{median(row.prompt_tokens):g}",
            _show_cached(row),
            _show(median(row.ttft_ms)),
            _show(min(row.ttft_ms)),
            _show(max(row.ttft_ms)),
        )
    return table


def _decode_table(results: Results) -> Table:
    table = _table(
        f"Decoding {results.plan.max_tokens} tokens",
        *("streams", "temperature", "ms/token", "gap p50", "gap p99", "tokens/s", "tokens/event"),
    )
    for row in results.decode:
        table.add_row(
            str(row.concurrency),
            f"{row.temperature:g}",
            _show(median(row.gap_ms)),
            _show(median(row.event_p50_ms)),
            _show(median(row.event_p99_ms)),
            _show(median(row.tokens_per_s)),
            f"{row.tokens_per_event:.2f}",
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _show_cached(row: FirstToken) -> str:
    known = [tokens for tokens in row.cached_tokens if tokens is not None]
    return f"{median(known):g}" if known else "?"


def _show(value: float) -> str:
    """Three significant digits without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
