"""A run folder as reports read it, in one pass: plan, rows of steps, evaluations and traces.

The figures of metrics.jsonl become columns over its steps (8 bytes of each figure a step), and
curves of them with a bounded number of points.
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
from dflop_jax.report.metrics import KEYED, SCALARS, WARMUP_STEPS, Name, numbers, spread
from dflop_jax.report.panels import Panel, panel_of
from dflop_jax.report.run_folder import (
    CONFIG,
    METRICS,
    SIMULATED,
    TRACE,
    HeldOutRow,
    metrics_file,
    metrics_rows,
    no_step,
    read_evaluations,
    read_plan,
)
from dflop_jax.report.trace import read_trace
from dflop_jax.report.wall_time import Spent, read_spent

CURVE_POINTS = 4096  # stretches of the loss curve: two points for each pixel of the widest picture
PICTURE_POINTS = 600  # max. points of a page's curve


@dataclass
class Columns:
    """What reports need of a run's rows.

    `values` has, by field (or field and key), a number for each step, float64, NaN where a step has
    none. `made_by` counts the schedules by what found them.
    """

    n_steps: int = 0
    n_skipped: int = 0
    made_by: Counter[str] = field(default_factory=Counter)
    values: dict[Name, np.ndarray] = field(default_factory=dict)

    def of(self, name: Name) -> np.ndarray:
        """A field over all steps."""
        return self.values.get(name, np.full(self.n_steps, math.nan))

    def keys(self, name: str) -> list[str]:
        """The keys of a field that is itself keyed (by submesh or module), in first order."""
        return [k[1] for k in self.values if isinstance(k, tuple) and k[0] == name]

    def steady(self, name: Name) -> np.ndarray:
        """A field over the steps after warm-up; over all of a run that is no longer."""
        return self.of(name)[WARMUP_STEPS if self.n_steps > WARMUP_STEPS else 0 :]

    def median(self, name: Name) -> float:
        """The median of a field over the steps after warm-up; nan where it has no value."""
        return spread(self.steady(name)).median

    def medians(self, name: str) -> dict[str, float]:
        """The medians of a field that is itself keyed."""
        return {key: self.median((name, key)) for key in self.keys(name)}

    def curve(self, max_stretches: int = CURVE_POINTS) -> tuple[list[float], list[float]]:
        """(steps, losses); of a run of more steps the lowest and the highest loss of as many
        stretches."""
        losses = self.of("loss")
        at = extremes(losses, max_stretches)
        return self.of("step")[at].tolist(), losses[at].tolist()

    def picture_steps(self) -> list[float]:
        """The first step of each stretch of a page's curve."""
        return self.of("step")[:: _stretch(self.n_steps, PICTURE_POINTS)].tolist()

    def picture(self, name: Name) -> list[float | None]:
        """The mean of a field over each stretch of a page's curve; None where it has no value."""
        return means(self.of(name))


def read_columns(folder: str | Path) -> Columns:
    """What reports need of a run folder's metrics.

    Raises:
      ValueError: as for `read_metrics`.
    """
    path, columns = metrics_file(folder), Columns()
    values: dict[Name, array[float]] = {}
    for n, row in enumerate(metrics_rows(path)):
        columns.n_steps += 1
        columns.n_skipped += row.skipped is not None
        columns.made_by[row.made_by or "unknown"] += 1
        for name, value in numbers(row, (*SCALARS, *KEYED)):
            column = values.setdefault(name, array("d"))
            column.extend([math.nan] * (n - len(column)))  # of the steps since it was there last
            column.append(value)
    if not columns.n_steps:
        raise no_step(path)
    for name, column in values.items():
        column.extend([math.nan] * (columns.n_steps - len(column)))
        columns.values[name] = np.frombuffer(column)
    return columns


def extremes(values: np.ndarray, max_stretches: int) -> np.ndarray:
    """Indices, ascending, of the lowest and the highest value of each stretch of equal length;
    all of them where there are no more values than stretches."""
    length = _stretch(len(values), max_stretches)
    if length == 1:
        return np.arange(len(values))
    padded = np.full(-(-len(values) // length) * length, math.nan)
    padded[: len(values)] = values
    stretches = padded.reshape(-1, length)
    begin = np.arange(len(stretches)) * length
    # A nan gives way to any number.
    low = np.where(np.isnan(stretches), math.inf, stretches).argmin(axis=1)
    high = np.where(np.isnan(stretches), -math.inf, stretches).argmax(axis=1)
    return np.unique([begin + low, begin + high])


def means(values: np.ndarray, max_stretches: int = PICTURE_POINTS) -> list[float | None]:
    """The mean of the finite values of each stretch of equal length; None where it has none."""
    if not len(values):
        return []
    begin = np.arange(0, len(values), _stretch(len(values), max_stretches))
    is_known = np.isfinite(values)
    totals = np.add.reduceat(np.where(is_known, values, 0.0), begin)
    counts = np.add.reduceat(is_known.astype(int), begin)
    return [float(t / n) if n else None for t, n in zip(totals, counts)]


def _stretch(n: int, max_stretches: int) -> int:
    """Values in each of at most so many stretches of `n`."""
    return max(1, -(-n // max_stretches))


_TITLES = {TRACE: "{name}, step {step}, {source}", SIMULATED: "{name}, {source}"}


@dataclass(frozen=True)
class RunRecord:
    """What reports show of a run.

    Attributes:
      rows: of its steps; empty where it did none.
      config: its config.json; empty where that is missing or broken.
      spent: where its time went; None where nothing tells.
    """

    name: str
    folder: Path
    plan: Plan
    rows: Columns
    evaluations: Sequence[HeldOutRow]
    config: dict[str, Any]
    spent: Spent | None

    @cached_property
    def traces(self) -> list[tuple[Panel, dict[int, str]]]:
        """Panels of its traces that hold an event, each with the labels of its groups."""
        return [*self._panels(TRACE), *self._panels(SIMULATED)]

    @property
    def panels(self) -> list[Panel]:
        """Those of the traces that the run itself wrote."""
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
    """All of a run folder that has steps or a timeline; `name` is the folder's unless given.

    Raises:
      ValueError: it holds neither, no plan, or a broken row, named as file:line.
    """
    path = Path(folder)
    # Without a timeline there is nothing to show of a run without steps: errors say what to do.
    needs_steps = not any((path / file).exists() for file in _TITLES)
    has_steps = next(metrics_rows(path / METRICS), None) is not None
    return RunRecord(
        name or path.resolve().name,
        path,
        rows=read_columns(path) if needs_steps or has_steps else Columns(),
        plan=read_plan(path),
        evaluations=read_evaluations(path),
        config=_config(path),
        spent=read_spent(path),
    )


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Runs by a name that tells them apart: the folder's, or its path where that repeats.

    Raises:
      ValueError: no folder; or see `read_run`.
    """
    if not folders:
        raise ValueError("no run folder given; name at least one, for example runs/demo/dflop")
    paths = list(dict.fromkeys(Path(f) for f in folders))
    short = [p.resolve().name for p in paths]
    return [read_run(p, s if short.count(s) == 1 else str(p)) for s, p in zip(short, paths)]


def _config(folder: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode((folder / CONFIG).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}
