"""Rows of the GPU benchmark as lines and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_targets import Row
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def cells_of(row: Row) -> list[str]:
    def show(value: float | None) -> str:
        return "–" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.3g}"

    verdict = {None: "", True: "pass", False: "MISSED"}[row.passed]
    over = "–" if not row.bound else f"{row.figure / row.bound:.2f}"
    cells = [row.work, f"{show(row.figure)} {row.unit}".strip(), show(row.bound), over]
    return [*cells, show(row.limit), verdict, row.note]


def print_rows(rows: Sequence[Row], title: str, console: Console) -> None:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in ("work", "figure", "bound", "÷ bound", "limit", "", "note"):
        table.add_column(column, justify="left" if column in ("work", "note") else "right")
    for row in rows:
        table.add_row(*cells_of(row))
    console.print(table)
