"""Charts of lines over the steps of runs, as plain values for a page's JSON.

A chart is {"title", "unit", "stacked", "from_zero", "lines"}; a line is {"name", "colour", "dash",
"axis", "y"}: "dash" is the index of a dash pattern, "axis" the index of its x values in `axes`, "y"
its values (null: none). Units are "", "s", "%" (of 1), "bytes" and "FLOP/s".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from dflop_jax.report.metrics import (
    COLUMNS,
    HOST_BYTES,
    LIVE_BYTES,
    PEAK_BYTES,
    PEAK_UPPER_BOUND,
)
from dflop_jax.report.panels import PHASE_COLOURS, line_colour, palette
from dflop_jax.report.reader import Columns, RunRecord, stretch_length, stretch_means

Values = Sequence[float | None]
# Colours of lines that belong to no module.
_COLOURS = {
    LIVE_BYTES: "#2b6cb0",
    PEAK_BYTES: "#9ecae1",
    PEAK_UPPER_BOUND: "#c6dbef",
    HOST_BYTES: "#8c6239",
    **PHASE_COLOURS,
}


class _Drawing:
    """The axes and charts of a page; the first axes are the steps of each run."""

    def __init__(self, runs: Sequence[RunRecord]) -> None:
        self.runs, self.several = runs, len(runs) > 1
        self.axes: list[list[float]] = []
        self.charts: list[dict[str, Any]] = []
        for run in runs:
            self.axis(run.rows.column("step")[:: stretch_length(run.rows.n_steps)].tolist())

    def axis(self, x: Sequence[float]) -> int:
        self.axes.append([_round_for_json(v) or 0.0 for v in x])
        return len(self.axes) - 1

    def chart(self, title: str, unit: str, lines: Sequence[dict[str, Any]], **more: Any) -> None:
        visible = [line for line in lines if any(y is not None for y in line["y"])]
        if visible:
            options = {"stacked": False, "from_zero": True, **more}
            self.charts.append({"title": title, "unit": unit, **options, "lines": visible})

    def by_run(self, name: str, values: Callable[[Columns], Values]) -> list[dict[str, Any]]:
        """Return a line for each run; `name` is the line's name if there is one run."""
        return [
            _make_line(run.name if self.several else name, line_colour(i), 0, i, values(run.rows))
            for i, run in enumerate(self.runs)
        ]

    def by_key(self, field_name: str, run_indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return a line for each key of a field, in the key's colour and the run's dashes."""
        keys = [(i, key) for i in run_indices for key in self.runs[i].rows.keys(field_name)]
        modules = palette(list(dict.fromkeys(key for _, key in keys)))
        colours = {module: pair[1] for module, pair in modules.items()} | _COLOURS
        lines = []
        for i, key in keys:
            run = self.runs[i]
            name = f"{key}, {run.name}" if len(run_indices) > 1 else key
            values = run.rows.chart_points((field_name, key))
            lines.append(_make_line(name, colours[key], i, i, values))
        return lines


def make_charts(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the axes and charts of runs; all runs share a chart, except for phases of steps."""
    d = _Drawing(runs)
    losses = [line for i, run in enumerate(runs) for line in _loss_lines(d, i, run)]
    d.chart("loss", "", losses, from_zero=False)
    if d.several or not runs[0].rows.keys("phase_s"):
        d.chart("step time", "s", d.by_run("step time", lambda rows: rows.chart_points("step_s")))
    for i, run in enumerate(runs):
        title = "step time by phase" + f", {run.name}" * d.several
        d.chart(title, "s", d.by_key("phase_s", [i]), stacked=True)
    has_mfu = any(run.rows.keys("mfu_by_module") for run in runs)
    for name, schema in COLUMNS.items():
        if schema.chart and (name != "flops_per_s_by_module" or not has_mfu):
            d.chart(schema.chart, schema.unit, d.by_key(name, range(len(runs))))
    baselines = [line for i, run in enumerate(runs) for line in _baseline_lines(d, i, run)]
    d.chart("step simulated with and without data-aware scheduling", "s", baselines)
    replaced = d.by_run("samples", lambda rows: stretch_means(np.nancumsum(rows.column("n_bad"))))
    d.chart("samples replaced so far", "", replaced)
    for key in dict.fromkeys(key for run in runs for key in run.rows.keys("own")):
        column = partial(Columns.chart_points, name=("own", key))
        d.chart(key, "", d.by_run(key, column), from_zero=False)
    return {"axes": d.axes, "charts": d.charts}


def _loss_lines(d: _Drawing, i: int, run: RunRecord) -> list[dict[str, Any]]:
    steps, losses = run.rows.curve()
    lines = [
        _make_line(run.name if d.several else "loss", line_colour(i), 0, d.axis(steps), losses)
    ]
    if evaluations := run.evaluations:
        axis = d.axis([row.step for row in evaluations])
        name = "held out" + f", {run.name}" * d.several
        lines.append(
            _make_line(
                name, line_colour(i + (not d.several)), 1, axis, [row.loss for row in evaluations]
            )
        )
    return lines


def _baseline_lines(d: _Drawing, i: int, run: RunRecord) -> list[dict[str, Any]]:
    """Return lines of the run's schedules and of each baseline, over the simulated steps."""
    rows = run.rows
    columns = {key: rows.column(("baseline_s", key)) for key in rows.keys("baseline_s")}
    indices = [k for k in range(rows.n_steps) if any(math.isfinite(c[k]) for c in columns.values())]
    axis = d.axis(rows.column("step")[indices][:: stretch_length(len(indices))].tolist())
    columns = {"data-aware": rows.column("makespan_s")} | columns
    return [
        _make_line(
            key + f", {run.name}" * d.several, line_colour(n), i, axis, stretch_means(c[indices])
        )
        for n, (key, c) in enumerate(columns.items())
    ]


def _make_line(name: str, colour: str, dash: int, axis: int, y: Values) -> dict[str, Any]:
    values = [None if v is None else _round_for_json(v) for v in y]
    return {"name": name, "colour": colour, "dash": dash, "axis": axis, "y": values}


def _round_for_json(value: float) -> float | None:
    """Round to six significant digits, finer than a pixel; None for values that are not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
