"""Several runs in one table and one picture; speed-ups are relative to the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from dflop_jax.report.summary import (
    RunSummary,
    figures,
    loss_curve,
    number,
    summarise,
    trace_panels,
)
from dflop_jax.report.timeline import Panel, draw_comparison


def compare(folders: Sequence[Path], out: Path) -> Table:
    """Table of the runs' figures, a column per run; the picture goes to `out` (a .png).

    The picture holds one timeline per run (its measured trace, else its first one) under a common
    time axis, and all loss curves.

    Raises:
      ValueError: no folder, or one that is not a run folder with at least a step.
    """
    runs = _runs(folders)
    names = list(runs)
    panels = [p for name, (folder, _) in runs.items() for p in _chosen(folder, name)]
    curves = {name: loss_curve(folder) for name, (folder, _) in runs.items()}
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    draw_comparison(panels, curves, out)

    summaries = [s for _, s in runs.values()]
    cells = [dict(figures(s)) for s in summaries]
    speedups = dict(zip(names, _speedups(summaries)))
    table = Table()
    table.add_column("figure")
    for name in names:
        table.add_column(escape(name), justify="right", overflow="fold")
    table.add_row("speed-up", *(f"{number(speedups[n])} x" for n in names), style="bold")
    for label in _labels(cells):
        table.add_row(escape(label), *(escape(c.get(label, "-")) for c in cells))
    return table


def compare_json(folders: Sequence[Path]) -> dict[str, Any]:
    """The same figures for programs: {"runs": [{..., "speedup": ...}]}, unknown ones null."""
    runs = _runs(folders)
    speedups = _speedups([s for _, s in runs.values()])
    return {
        "runs": [
            _finite(asdict(s)) | {"name": name, "speedup": _finite(up)}
            for (name, (_, s)), up in zip(runs.items(), speedups)
        ]
    }


def _runs(folders: Sequence[Path]) -> dict[str, tuple[Path, RunSummary]]:
    """Runs by a name that tells them apart: the folder's, or its path where that repeats."""
    if not folders:
        raise ValueError("no run folder given; name at least one, for example runs/demo/dflop")
    paths = list(dict.fromkeys(Path(f) for f in folders))
    summaries = [summarise(p) for p in paths]
    short = [s.name for s in summaries]
    names = [s if short.count(s) == 1 else str(p) for s, p in zip(short, paths)]
    return dict(zip(names, zip(paths, summaries)))


def _chosen(folder: Path, name: str) -> list[Panel]:
    """The run's panel in a comparison, none without a trace."""
    panels = trace_panels(folder, name)
    return [p for p in panels if p.trace.source == "measured"][:1] or panels[:1]


def _speedups(summaries: Sequence[RunSummary]) -> list[float]:
    """Median step time of the first run over each run's."""
    base = summaries[0].step_s.median
    return [base / s.step_s.median if s.step_s.median > 0 else math.nan for s in summaries]


def _labels(cells: Sequence[dict[str, str]]) -> list[str]:
    """All labels, in the runs' own order: one that a run adds follows its neighbour there."""
    order: list[str] = []
    for cell in cells:
        at = 0
        for label in cell:
            if label not in order:
                order.insert(at, label)
            at = order.index(label) + 1
    return order


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
