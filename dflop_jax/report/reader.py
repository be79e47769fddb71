"""A run folder as a page reads it: plan, rows of steps, evaluations, and where its time went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dflop_jax.records import Plan
from dflop_jax.report.columns import Columns, read_columns
from dflop_jax.report.evaluation_rows import HeldOutRow, read_evaluations
from dflop_jax.report.panels import Panel, panel_of
from dflop_jax.report.run_folder import CONFIG, SIMULATED, TRACE, has_steps, read_plan
from dflop_jax.report.spent import Spent, read_goodput, read_spent
from dflop_jax.report.summary import RunSummary, summarise
from dflop_jax.report.trace import read_trace

_TITLES = {TRACE: "{name}, step {step}, {source}", SIMULATED: "{name}, {source}"}


class _Steps(msgspec.Struct):
    steps: int = 0


class _Config(msgspec.Struct):
    """What is read of a run's config.json."""

    train: _Steps = msgspec.field(default_factory=_Steps)


@dataclass(frozen=True)
class RunRecord:
    """What a page shows of a run.

    Attributes:
      rows: of its steps; empty where it did none.
      summary: its figures; None where it did no step.
      goodput: see `read_goodput`.
      traces: panels of its traces that hold an event, each with the labels of its groups.
      n_planned: steps that it is to do; 0 where nothing tells.
    """

    name: str
    folder: Path
    plan: Plan
    rows: Columns
    summary: RunSummary | None
    evaluations: Sequence[HeldOutRow]
    spent: Spent | None
    goodput: tuple[list[float], list[float]]
    traces: Sequence[tuple[Panel, dict[int, str]]]
    n_planned: int


def read_run(name: str, folder: Path) -> RunRecord:
    """All of a run folder that has steps or a timeline.

    Raises:
      ValueError: it holds neither, no plan, or a broken row, named as file:line.
    """
    # Without a timeline there is nothing to show of a run without steps: errors say what to do.
    needs_steps = not any((folder / file).exists() for file in _TITLES)
    stepped = needs_steps or has_steps(folder)
    rows, plan = read_columns(folder) if stepped else Columns(), read_plan(folder)
    return RunRecord(
        name,
        folder,
        plan,
        rows,
        summarise(folder) if stepped else None,
        read_evaluations(folder),
        read_spent(folder),
        read_goodput(folder),
        _traces(name, folder, plan),
        _n_planned(folder),
    )


def _traces(name: str, folder: Path, plan: Plan) -> list[tuple[Panel, dict[int, str]]]:
    return [
        (panel_of(plan.layout, t, title.format(name=name, step=t.step, source=t.source)), labels)
        for file, title in _TITLES.items()
        if (folder / file).exists()
        for t, labels in read_trace(folder / file)
        if t.makespan_s > 0
    ]


def _n_planned(folder: Path) -> int:
    try:
        config = msgspec.json.decode((folder / CONFIG).read_bytes(), type=_Config)
    except (OSError, msgspec.DecodeError):
        return 0
    return config.train.steps
