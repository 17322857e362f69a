"""Results of bench_serve as tables for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from bench_scenarios import FirstToken, Results
from engine_counters import EngineWork
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
                if name != "work" and isinstance(values, Sequence) and None not in values
            }
            if row["work"]:
                row["median"]["work"] = {
                    name: median(cost[name] for cost in row["work"]) for name in row["work"][0]
                }
    return raw


def _first_token_table(title: str, column: str, rows: Sequence[FirstToken]) -> Table:
    told = any(row.work for row in rows)
    table = _table(title, column, "sent", "cached", "TTFT ms", "least", "most")
    if told:
        _add_columns(table, "path", "distinct", "misses", "MB")
    for row in rows:
        table.add_row(
            str(row.tokens),
            f"{median(row.prompt_tokens):g}",
            _show_cached(row),
            _show(median(row.ttft_ms)),
            _show(min(row.ttft_ms)),
            _show(max(row.ttft_ms)),
            *(_show_work(row.work) if told else ()),
        )
    return table


def _decode_table(results: Results) -> Table:
    table = _table(
        f"Decoding {results.plan.max_tokens} tokens",
        *("streams", "temperature", "ms/token", "gap p50", "gap p99", "tokens/s", "tokens/event"),
    )
    told = any(row.work for row in results.decode)
    if told:
        _add_columns(table, "distinct/step", "misses/step", "miss %")
    for row in results.decode:
        table.add_row(
            str(row.concurrency),
            f"{row.temperature:g}",
            _show(median(row.gap_ms)),
            _show(median(row.event_p50_ms)),
            _show(median(row.event_p99_ms)),
            _show(median(row.tokens_per_s)),
            f"{row.tokens_per_event:.2f}",
            *(_show_steps(row.work) if told else ()),
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    _add_columns(table, *columns)
    return table


def _add_columns(table: Table, *columns: str) -> None:
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)


def _show_work(work: Sequence[EngineWork]) -> tuple[str, ...]:
    """How the prompt was computed, experts that its tokens asked for (summed over layers), those
    that were loaded, and their bytes."""
    if not work:
        return ("?",) * 4
    in_pass = median(cost.steps_pass for cost in work)
    return (
        "pass" if in_pass else "on demand",
        _show(median(cost.distinct_experts for cost in work)),
        _show(median(cost.slot_misses for cost in work)),
        _show(median(cost.expert_bytes for cost in work) / 1e6),
    )


def _show_steps(work: Sequence[EngineWork]) -> tuple[str, ...]:
    if not work:
        return ("?",) * 3
    steps = [max(1.0, cost.steps) for cost in work]
    return (
        _show(median(cost.distinct_experts / n for cost, n in zip(work, steps, strict=True))),
        _show(median(cost.slot_misses / n for cost, n in zip(work, steps, strict=True))),
        f"{median(cost.miss_rate for cost in work) * 100:.1f}",
    )


def _show_cached(row: FirstToken) -> str:
    known = [tokens for tokens in row.cached_tokens if tokens is not None]
    return f"{median(known):g}" if known else "?"


def _show(value: float) -> str:
    """Three significant digits without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
