"""A run folder as reports read it, in one pass: plan, rows of steps, evaluations and traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from dflop_jax.records import Plan
from dflop_jax.report.columns import Columns, read_columns
from dflop_jax.report.panels import Panel, panel_of
from dflop_jax.report.run_folder import (
    CONFIG,
    METRICS,
    SIMULATED,
    TRACE,
    HeldOutRow,
    metrics_rows,
    read_evaluations,
    read_plan,
)
from dflop_jax.report.spent import Spent, read_spent
from dflop_jax.report.trace import read_trace

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
