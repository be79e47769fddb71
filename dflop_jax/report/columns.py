"""The figures of a run's metrics.jsonl in one pass that holds a bounded part of it, however many
steps the run has."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dflop_jax.report.curves import Curve, Means
from dflop_jax.report.metrics import KEYED, SCALARS, WARMUP_STEPS, SkippedUpdate
from dflop_jax.report.row_file import whole_lines
from dflop_jax.report.run_folder import checked_row, metrics_file, no_step

# Steps that medians are of: all of a run up to here, else as many drawn at random, by which a
# percentile moves by less than one.
MEDIAN_STEPS = 20_000
PICTURE_POINTS = 600  # most of a page's curve
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
    reader = ColumnReader(path)
    for line in whole_lines(path):
        reader.add(line)
    return reader.columns()


# Fields that pages draw over the steps.
DRAWN = ("step_s", "mfu", "flops_per_s")
DRAWN_BY_NAME = (
    "phase_s", "mfu_by_module", "flops_per_s_by_module", "padding_fraction", "imbalance",
    "memory_bytes", "own",
)  # fmt: skip
REPLACED = "samples replaced"  # so far: the drawn sum of `n_bad`


class ColumnReader:
    """Adds up the rows of a metrics.jsonl, a line at a time; what it holds is bounded."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._n_lines = 0
        self._columns, self._steady, self.losses = Columns(), _Steady(), Curve()
        self.means = Means(PICTURE_POINTS)
        self._warm_up: list[Any] = []

    def add(self, line: bytes) -> None:
        """Add a row; ValueError names the place of a broken one, which counts for nothing."""
        self._n_lines += 1
        try:
            row = _ROWS.decode(line)
        except msgspec.DecodeError as e:
            where = f"{self._path}:{self._n_lines}"
            checked_row(line, where)
            raise ValueError(f"{where}: not a row of metrics ({e}); remove the line") from None
        columns, loss = self._columns, math.nan if row.loss is None else row.loss
        if not columns.n_steps:
            columns.first_step, columns.loss_first = row.step, loss
        columns.n_steps += 1
        columns.last_step, columns.loss_last = row.step, loss
        for name in ADDED_UP:
            columns.sums[name] += getattr(row, name) or 0
        self.losses.add(row.step, loss)
        self.means.add(row.step, _drawn(row, columns.sums["n_bad"]))
        if columns.n_steps <= WARMUP_STEPS:
            self._warm_up.append(row)
            for name in ADDED_UP:
                columns.warm_up_sums[name] += getattr(row, name) or 0
        else:
            self._steady.add(row)
        columns.n_skipped += row.skipped is not None
        columns.n_integer += (row.integer_bound_s or 0) > 0
        columns.made_by[row.made_by or "unknown"] += 1

    @property
    def n_steps(self) -> int:
        return self._columns.n_steps

    def columns(self) -> Columns:
        """What the rows so far come to; ValueError: there is none."""
        if not self.n_steps:
            raise no_step(self._path)
        steady = self._steady
        if self.n_steps <= WARMUP_STEPS:
            steady = _Steady()
            for row in self._warm_up:
                steady.add(row)
        sums, warm_up_sums = dict(self._columns.sums), dict(self._columns.warm_up_sums)
        return replace(
            self._columns,
            made_by=Counter(self._columns.made_by),
            sums=sums,
            warm_up_sums=warm_up_sums,
            values=steady.columns(),
            curve=self.losses.points(),
        )


def _drawn(row: Any, n_replaced: float) -> Iterator[tuple[Hashable, float | None]]:
    yield REPLACED, n_replaced
    for name in DRAWN:
        yield name, getattr(row, name)
    for name in DRAWN_BY_NAME:
        for key, value in (getattr(row, name) or {}).items():
            yield (name, key), value


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
