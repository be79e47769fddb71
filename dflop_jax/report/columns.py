"""The figures of a run's metrics.jsonl as columns over its steps: 8 bytes of each figure a step."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dflop_jax.report.curves import begins, extremes, means
from dflop_jax.report.metrics import KEYED, SCALARS, WARMUP_STEPS, SkippedUpdate
from dflop_jax.report.row_file import whole_lines
from dflop_jax.report.run_folder import checked_row, metrics_file, no_step

CURVE_POINTS = 4096  # stretches of the loss curve: two points for each pixel of the widest picture
PICTURE_POINTS = 600  # max. points of a page's curve
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
Name = str | tuple[str, str]  # a field, or a field and a key


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

    def curve(self, max_stretches: int = CURVE_POINTS) -> tuple[list[float], list[float]]:
        """(steps, losses); of a run of more steps the lowest and the highest loss of as many
        stretches."""
        losses = self.of("loss")
        at = extremes(losses, max_stretches)
        return self.of("step")[at].tolist(), losses[at].tolist()

    def picture_steps(self) -> list[float]:
        """The first step of each stretch of a page's curve."""
        steps = self.of("step")
        return steps[begins(steps, PICTURE_POINTS)].tolist()

    def picture(self, name: Name) -> list[float | None]:
        """The mean of a field over each stretch of a page's curve; None where it has no value."""
        return means(self.of(name), PICTURE_POINTS)


def read_columns(folder: str | Path) -> Columns:
    """What reports need of a run folder's metrics.

    Raises:
      ValueError: as for `read_metrics`.
    """
    path = metrics_file(folder)
    stat = path.stat()
    columns = _read(path, stat.st_size, stat.st_mtime_ns)
    if not columns.n_steps:
        raise no_step(path)
    return columns


@lru_cache(_RUNS_REMEMBERED)
def _read(path: Path, size: int, changed_ns: int) -> Columns:
    columns = Columns()
    values: dict[Name, array[float]] = {}
    for n, line in enumerate(whole_lines(path)):
        try:
            row = _ROWS.decode(line)
        except msgspec.DecodeError as e:
            where = f"{path}:{n + 1}"
            checked_row(line, where)
            raise ValueError(f"{where}: not a row of metrics ({e}); remove the line") from None
        columns.n_steps += 1
        columns.n_skipped += row.skipped is not None
        columns.made_by[row.made_by or "unknown"] += 1
        for name, value in _numbers(row):
            column = values.get(name)
            if column is None:
                column = values[name] = array("d")
            if len(column) < n:
                column.extend([math.nan] * (n - len(column)))
            column.append(value)
    for name, column in values.items():
        column.extend([math.nan] * (columns.n_steps - len(column)))
        columns.values[name] = np.frombuffer(column)
    return columns


def _numbers(row: Any) -> Iterator[tuple[Name, float]]:
    """The numbers that a row has."""
    for name in SCALARS:
        if (value := getattr(row, name)) is not None:
            yield name, value
    for name in KEYED:
        for key, value in (getattr(row, name) or {}).items():
            if value is not None:
                yield (name, key), value
