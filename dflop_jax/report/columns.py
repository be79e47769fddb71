"""The figures of a run's metrics.jsonl in one pass that holds a bounded part of it, however many
steps the run has."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dflop_jax.report.metrics import KEYED, SCALARS, WARMUP_STEPS, SkippedUpdate
from dflop_jax.report.row_file import whole_lines
from dflop_jax.report.run_folder import checked_row, metrics_file, no_step

# Steps that medians are of: all of a run up to here, else as many drawn at random, by which a
# percentile moves by less than one.
MEDIAN_STEPS = 20_000
# A curve's points, two for each pixel of the widest picture.
CURVE_POINTS = 4096
ADDED_UP = ("compiles", "schedule_wait_s", "n_bad")
_RUNS_REMEMBERED = 4  # a report asks several times for the figures of each run

_Row = msgspec.defstruct(
    "_Row",
    [
        ("step", int),
        ("step_s", float),
        *((n, float | None, None) for n in SCALARS if n not in ("step", "step_s")),
        *((n, dict[str, float | None] | None, None) for n in KEYED),
        ("skipped", SkippedUpdate | None, None),
        ("made_by", str | None, None),
    ],
)
_ROWS: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Row)


@dataclass
class Columns:
    """What reports need of a run's rows.

    `values` has, by field (or field and key) the numbers of the steps after warm-up (of all of a
    run that is no longer), float64, NaN where a step has none; of a run of more than MEDIAN_STEPS
    steps those of as many, drawn. `sums` are of all steps, `warm_up_sums` of the first ones.
    `curve` are steps and losses, of more than CURVE_POINTS steps the lowest and the highest loss
    of as many stretches as are drawn apart. `made_by` counts the schedules by what found them,
    `n_integer` those of which an integer program proved something.
    """

    n_steps: int = 0
    first_step: int = 0
    last_step: int = 0
    loss_first: float = math.nan
    loss_last: float = math.nan
    n_skipped: int = 0
    n_integer: int = 0
    made_by: Counter[str] = field(default_factory=Counter)
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ADDED_UP, 0.0))
    warm_up_sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ADDED_UP, 0.0))
    values: dict[str | tuple[str, str], np.ndarray] = field(default_factory=dict)
    curve: tuple[list[float], list[float]] = ([], [])

    def column(self, name: str) -> np.ndarray:
        """One field over the steps."""
        return self.values.get(name, np.empty(0))

    def column_of(self, name: str) -> dict[str, np.ndarray]:
        """A field that is itself keyed (by submesh or module): one column per key, in first
        order."""
        return {k[1]: v for k, v in self.values.items() if isinstance(k, tuple) and k[0] == name}


def read_columns(folder: str | Path) -> Columns:
    """What reports need of a run folder's metrics.

    Raises:
      ValueError: as for `read_metrics`.
    """
    path = metrics_file(folder)
    stat = path.stat()
    return _read(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(_RUNS_REMEMBERED)
def _read(path: Path, size: int, changed_ns: int) -> Columns:
    columns, warm_up, steady, curve = Columns(), [], _Steady(), _Curve()
    for n, line in enumerate(whole_lines(path), 1):
        try:
            row = _ROWS.decode(line)
        except msgspec.DecodeError as e:
            checked_row(line, f"{path}:{n}")
            raise ValueError(f"{path}:{n}: not a row of metrics ({e}); remove the line") from None
        loss = math.nan if row.loss is None else row.loss
        if n == 1:
            columns.first_step, columns.loss_first = row.step, loss
        columns.last_step, columns.loss_last = row.step, loss
        for name in ADDED_UP:
            columns.sums[name] += getattr(row, name) or 0
        curve.add(row.step, loss)
        if n <= WARMUP_STEPS:
            warm_up.append(row)
        else:
            steady.add(row)
        columns.n_skipped += row.skipped is not None
        columns.n_integer += (row.integer_bound_s or 0) > 0
        columns.made_by[row.made_by or "unknown"] += 1
        columns.n_steps = n
    if not columns.n_steps:
        raise no_step(path)
    for row in warm_up:
        for name in ADDED_UP:
            columns.warm_up_sums[name] += getattr(row, name) or 0
        if columns.n_steps <= WARMUP_STEPS:
            steady.add(row)
    columns.values, columns.curve = steady.columns(), curve.points()
    return columns


class _Steady:
    """As many rows as medians are of, each of those seen with the same chance (Vitter's algorithm
    R), the same ones every time."""

    def __init__(self) -> None:
        self._seen = 0
        self._random = random.Random(0)
        self._columns: dict[str | tuple[str, str], np.ndarray] = {}

    def add(self, row: Any) -> None:
        place = self._seen
        self._seen += 1
        if place >= MEDIAN_STEPS:
            place = self._random.randrange(self._seen)
            if place >= MEDIAN_STEPS:
                return
            for column in self._columns.values():
                column[place] = math.nan
        for name in SCALARS:
            value = getattr(row, name)
            if value is not None:
                self._set(name, place, value)
        for name in KEYED:
            for key, value in (getattr(row, name) or {}).items():
                if value is not None:
                    self._set((name, key), place, value)

    def _set(self, name: str | tuple[str, str], place: int, value: float) -> None:
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = np.full(MEDIAN_STEPS, math.nan)
        column[place] = value

    def columns(self) -> dict[str | tuple[str, str], np.ndarray]:
        return {k: v[: self._seen].copy() for k, v in self._columns.items()}


Point = tuple[int, float]


class _Curve:
    """A curve that keeps the lowest and the highest value of each of a bounded number of stretches
    of equal length."""

    def __init__(self) -> None:
        self._length = 1  # rows in a stretch
        self._rows = 0
        self._stretches: list[tuple[Point, Point]] = []

    def add(self, step: int, value: float) -> None:
        point = step, value
        if self._rows % self._length == 0:
            if len(self._stretches) == CURVE_POINTS:
                pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
                self._stretches = [_joined(a, b) for a, b in pairs]
                self._length *= 2
            self._stretches.append((point, point))
        else:
            self._stretches[-1] = _joined(self._stretches[-1], (point, point))
        self._rows += 1

    def points(self) -> tuple[list[float], list[float]]:
        points = [p for stretch in self._stretches for p in sorted({*stretch})]
        return [float(step) for step, _ in points], [value for _, value in points]


def _joined(a: tuple[Point, Point], b: tuple[Point, Point]) -> tuple[Point, Point]:
    """The lowest and the highest point of two stretches; a NaN gives way to any number."""
    (a_low, a_high), (b_low, b_high) = a, b
    if math.isnan(a_low[1]):
        return b
    if math.isnan(b_low[1]):
        return a
    return min(a_low, b_low, key=_value), max(a_high, b_high, key=_value)


def _value(point: Point) -> float:
    return point[1]
