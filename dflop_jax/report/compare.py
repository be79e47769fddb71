"""Tables and pictures that compare runs; speed-ups are relative to the first run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dflop_jax.folders import writable_path
from dflop_jax.report.number_format import number
from dflop_jax.report.reader import RunRecord
from dflop_jax.report.run_folder import LOSS, SUMMARY, TIMELINE
from dflop_jax.report.summary import baseline_lines, figures, plan_lines

SPEEDUP = "speed-up"  # the label of the first figure of a comparison
_WORKLOAD_FIELDS = (
    ("model", "factory"),
    ("model", "size"),
    ("data", "path"),
    ("data", "factory"),
    ("train", "global_batch"),
)


def compare(runs: Sequence[RunRecord], picture_path: Path, only: Sequence[str] = ()) -> Table:
    """Return a table of the runs' figures, with a column per run, and write a .png with one
    timeline per run (the measured trace, else the first one) and all loss curves. `only` are
    prefixes of the figures' labels; (): all. ValueError: a run has no step."""
    from dflop_jax.report.timeline import draw

    table = figures_table(runs, only)
    measured_first = (sorted(r.panels, key=lambda p: p.trace.source != "measured") for r in runs)
    with writable_path(picture_path, "choose another --out") as picture:
        panels = [p for of_run in measured_first for p in of_run[:1]]
        draw(panels, {run.name: run.rows.curve() for run in runs}, picture)
    return table


def figures_table(runs: Sequence[RunRecord], only: Sequence[str] = ()) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("figure")
    for run in runs:
        table.add_column(escape(run.name), justify="right", overflow="fold")
    for label, cells in comparison_rows(runs):
        if not only or label.startswith(tuple(only)):
            style = "bold" if label == SPEEDUP else None
            table.add_row(escape(label), *map(escape, cells), style=style)
    return table


def summary_table(run: RunRecord) -> Group:
    """Return the terminal summary of one run: its figures, its plan and the paths of pictures."""
    files = (run.folder / name for name in (TIMELINE, LOSS, SUMMARY))
    lines = [*baseline_lines(run), *plan_lines(run)]
    lines += [str(path) for path in files if path.exists()]
    return Group(figures_table([run]), *map(Text, lines))


def comparison_rows(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Return (label, one text per run) of every figure; several runs start with speed-ups."""
    cells = [{f.label: f.text for f in figures(run)} for run in runs]
    ratios = ["-" if math.isnan(ratio) else f"{number(ratio)} x" for ratio in speedups(runs)]
    rows = [(label, [c.get(label, "-") for c in cells]) for label in _merge_labels(cells)]
    return [(SPEEDUP, ratios), *rows] if len(runs) > 1 else rows


def compare_json(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the figures as JSON, with "unit" and "values" by label; unknown values are null."""
    rows = []
    for run, speedup in zip(runs, speedups(runs)):
        values = {
            f.label: {"unit": f.unit, "values": [*map(_finite_or_none, f.values)]}
            for f in figures(run)
        }
        head = {"name": run.name, "folder": str(run.folder), "speedup": _finite_or_none(speedup)}
        rows.append({**head, "figures": values})
    return {"runs": rows}


def speedups(runs: Sequence[RunRecord]) -> list[float]:
    """Return the first run's median step time divided by each run's; nan if model, data or batch
    differ."""
    times_s = [run.rows.median("step_s") for run in runs]
    workloads = [_workload(run) for run in runs]
    return [
        times_s[0] / s if s > 0 and workload == workloads[0] else math.nan
        for s, workload in zip(times_s, workloads)
    ]


def _workload(run: RunRecord) -> list[Any]:
    """Return model, data and batch of a run's configuration; [] if there is none."""
    try:
        return [run.config[section][name] for section, name in _WORKLOAD_FIELDS]
    except (LookupError, TypeError):
        return []


def _merge_labels(cells: Sequence[dict[str, str]]) -> list[str]:
    """Return all labels in the first run's order; a label that it lacks follows its predecessor."""
    order: list[str] = []
    for cell in cells:
        index = 0
        for label in cell:
            if label not in order:
                order.insert(index, label)
            index = order.index(label) + 1
    return order


def _finite_or_none(value: float | str) -> float | str | None:
    return None if isinstance(value, float) and not math.isfinite(value) else value
