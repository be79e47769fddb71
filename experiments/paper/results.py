"""What an experiment makes: a table for the report, and lines about its progress."""

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
    """One experiment's table for the report. `why` explains what differs from the paper."""

    name: str
    title: str
    paper: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    why: list[str] = field(default_factory=list)
    bars: dict[str, list[float]] = field(default_factory=dict)
    "series of the picture: name -> a value per label"
    labels: list[str] = field(default_factory=list)
    unit: str = ""

    def add(self, label: str, cells: Sequence[str], **bars: float) -> None:
        """A row, which begins with its label, and its bars in the picture."""
        self.rows.append([label, *cells])
        self.labels.append(label)
        for name, value in bars.items():
            self.bars.setdefault(name, []).append(value)


def ratio(a: float, b: float) -> str:
    return f"{a / b:.2f}x"


def percent(x: float) -> str:
    return f"{100 * x:.0f}%"


def say(what: str) -> None:
    """Progress, on stderr."""
    print(f"[{time.perf_counter() - _STARTED_S:5.0f} s] {what}", file=sys.stderr, flush=True)


def print_result(result: Result) -> None:
    """The table, what the paper says, and why ours differs."""
    console = Console(width=160 if not sys.stdout.isatty() else None)
    table = Table(title=result.title)
    for i, column in enumerate(result.columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in result.rows:
        table.add_row(*row)
    console.print(table)
    console.print(f"paper: {result.paper}")
    for line in result.notes:
        console.print(f"- {line}")
    for line in result.why:
        console.print(f"why: {line}")
