"""Read a run folder for reports: plan, rows of steps, evaluations and traces.

The numbers of metrics.jsonl become columns over the steps (8 bytes per number and step), and curves
with a limited number of points.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dflop_jax.records import Plan
from dflop_jax.report import metrics, run_folder
from dflop_jax.report.metrics import WARMUP_STEPS, ColumnKey
from dflop_jax.report.panels import Panel, panel_of
from dflop_jax.report.run_folder import CONFIG, METRICS, SIMULATED, TRACE, EvaluationRow
from dflop_jax.report.trace import read_trace
from dflop_jax.report.wall_time import WallTime, read_wall_time

# Maximum number of stretches (intervals) of a curve, each with one point or its lowest and highest.
MAX_STRETCHES = 600


@dataclass
class Columns:
    """The columns of a run's rows."""

    n_steps: int = 0
    n_skipped: int = 0
    made_by: Counter[str] = field(default_factory=Counter)  # number of schedules by method
    # By field (or field and key) a number for each step, float64; NaN if the step has none.
    values: dict[ColumnKey, np.ndarray] = field(default_factory=dict)

    def column(self, name: ColumnKey) -> np.ndarray:
        return self.values.get(name, np.full(self.n_steps, math.nan))

    def keys(self, name: str) -> list[str]:
        """Return the keys of a keyed field, in order of first occurrence."""
        return [k[1] for k in self.values if isinstance(k, tuple) and k[0] == name]

    def after_warmup(self, name: ColumnKey) -> np.ndarray:
        """Return a field over the steps after warm-up; over all steps if the run is no longer."""
        return self.column(name)[WARMUP_STEPS if self.n_steps > WARMUP_STEPS else 0 :]

    def median(self, name: ColumnKey) -> float:
        """Return the median of a field over the steps after warm-up; nan if it has no value."""
        return metrics.percentiles(self.after_warmup(name)).median

    def medians(self, name: str) -> dict[str, float]:
        """Return the medians of a keyed field by key."""
        return {key: self.median((name, key)) for key in self.keys(name)}

    def curve(self, max_stretches: int = MAX_STRETCHES) -> tuple[list[float], list[float]]:
        """Return (steps, losses); for a long run, the lowest and highest loss of each stretch."""
        losses = self.column("loss")
        indices = extreme_indices(losses, max_stretches)
        return self.column("step")[indices].tolist(), losses[indices].tolist()

    def chart_points(self, name: ColumnKey) -> list[float | None]:
        """Return the mean of a field over each stretch of a page's curve."""
        return stretch_means(self.column(name))


def read_columns(folder: str | Path) -> Columns:
    """Read the columns of a run folder's metrics; ValueError: as for `read_metrics`."""
    path, columns = run_folder.metrics_file(folder), Columns()
    values: dict[ColumnKey, array[float]] = {}
    for n, row in enumerate(run_folder.metrics_rows(path)):
        columns.n_steps += 1
        columns.n_skipped += row.skipped is not None
        columns.made_by[row.made_by or "unknown"] += 1
        for name, value in metrics.iter_numbers(
            row, (*metrics.SCALAR_FIELDS, *metrics.KEYED_FIELDS)
        ):
            column = values.setdefault(name, array("d"))
            column.extend([math.nan] * (n - len(column)))  # fill the steps without a value
            column.append(value)
    if not columns.n_steps:
        raise run_folder.no_step_error(path)
    for name, column in values.items():
        column.extend([math.nan] * (columns.n_steps - len(column)))
        columns.values[name] = np.frombuffer(column)
    return columns


def extreme_indices(values: np.ndarray, max_stretches: int) -> np.ndarray:
    """Return the ascending indices of the lowest and the highest value of each stretch of equal
    length; all indices if there are at most `max_stretches` values."""
    length = stretch_length(len(values), max_stretches)
    if length == 1:
        return np.arange(len(values))
    padded = np.full(-(-len(values) // length) * length, math.nan)
    padded[: len(values)] = values
    stretches = padded.reshape(-1, length)
    starts = np.arange(len(stretches)) * length
    # Any number is preferred to nan.
    lowest = np.where(np.isnan(stretches), math.inf, stretches).argmin(axis=1)
    highest = np.where(np.isnan(stretches), -math.inf, stretches).argmax(axis=1)
    return np.unique([starts + lowest, starts + highest])


def stretch_means(values: np.ndarray, max_stretches: int = MAX_STRETCHES) -> list[float | None]:
    """Return the mean of the finite values of each stretch of equal length; None without any."""
    if not len(values):
        return []
    starts = np.arange(0, len(values), stretch_length(len(values), max_stretches))
    is_finite = np.isfinite(values)
    totals = np.add.reduceat(np.where(is_finite, values, 0.0), starts)
    counts = np.add.reduceat(is_finite.astype(int), starts)
    return [float(t / n) if n else None for t, n in zip(totals, counts)]


def stretch_length(n: int, max_stretches: int = MAX_STRETCHES) -> int:
    """Return the length of each of at most `max_stretches` stretches of `n` values."""
    return max(1, -(-n // max_stretches))


_TITLES = {TRACE: "{name}, step {step}, {source}", SIMULATED: "{name}, {source}"}


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run folder for reports."""

    name: str
    folder: Path
    plan: Plan
    rows: Columns  # of its steps; empty if it has none
    evaluations: Sequence[EvaluationRow]
    config: dict[str, Any]  # empty if the file is missing or broken
    wall_time: WallTime | None  # None if unknown

    @cached_property
    def traces(self) -> list[tuple[Panel, dict[int, str]]]:
        """The panels of all traces with events, each with the labels of its groups."""
        return [*self._panels(TRACE), *self._panels(SIMULATED)]

    @property
    def panels(self) -> list[Panel]:
        """The panels of the traces that training wrote."""
        return [panel for panel, _ in self._panels(TRACE)]

    def _panels(self, file: str) -> list[tuple[Panel, dict[int, str]]]:
        if not (self.folder / file).exists():
            return []
        return [
            (panel_of(self.plan.layout, t, title), labels)
            for t, labels in read_trace(self.folder / file)
            if t.makespan_s > 0
            for title in [_TITLES[file].format(name=self.name, step=t.step, source=t.source)]
        ]


def read_run(folder: str | Path, name: str = "") -> RunRecord:
    """Read a run folder with steps or a timeline; `name` defaults to the folder's name."""
    path = Path(folder)
    # A run without a timeline must have steps; reading them raises errors that say what to do.
    needs_steps = not any((path / file).exists() for file in _TITLES)
    has_steps = next(run_folder.metrics_rows(path / METRICS), None) is not None
    return RunRecord(
        name or path.resolve().name,
        path,
        rows=read_columns(path) if needs_steps or has_steps else Columns(),
        plan=run_folder.read_plan(path),
        evaluations=run_folder.read_evaluations(path),
        config=_read_config(path),
        wall_time=read_wall_time(path),
    )


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Read runs with unique names: the folder's name, or its path if the name repeats."""
    if not folders:
        raise ValueError("no run folder given; name at least one, for example runs/demo/dflop")
    paths = list(dict.fromkeys(Path(f) for f in folders))
    short = [p.resolve().name for p in paths]
    return [read_run(p, s if short.count(s) == 1 else str(p)) for s, p in zip(short, paths)]


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}
