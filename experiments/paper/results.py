"""Results of experiments as tables, and progress messages."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

_STARTED_S = time.perf_counter()


@dataclass
class Result:
    """One experiment's table. `differences` explains those from the paper; `summary` explains a
    table on the report's first page."""

    name: str
    title: str
    paper: str
    columns: str | Sequence[str]
    'a string has columns separated by " | "'
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)
    bars: dict[str, list[float]] = field(default_factory=dict)
    "series of the bar chart: name -> a value per label"
    labels: list[str] = field(default_factory=list)
    unit: str = ""
    on_first_page: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.columns, str):
            self.columns = self.columns.split(" | ")

    def add(self, label: str, cells: Sequence[str], **bars: float) -> None:
        """Add a row with its label, and its bars in the chart."""
        self.rows.append([label, *cells])
        self.labels.append(label)
        for name, value in bars.items():
            self.bars.setdefault(name, []).append(value)


def print_progress(message: str) -> None:
    """Print progress to stderr."""
    print(f"[{time.perf_counter() - _STARTED_S:5.0f} s] {message}", file=sys.stderr, flush=True)


def print_result(result: Result) -> None:
    """Print the table, the paper's claim, notes and differences."""
    console = Console(width=160 if not sys.stdout.isatty() else None)
    table = Table(title=result.title)
    for i, column in enumerate(result.columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in result.rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"paper: {result.paper}")
    for line in (*result.summary, *result.notes):
        console.print(f"- {line}")
    for line in result.differences:
        console.print(f"difference: {line}")
