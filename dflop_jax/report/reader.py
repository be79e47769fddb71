"""A run folder as it was read so far: once to its end for a report, again and again for a page that
follows a run. What it holds is bounded, but for 8 bytes a step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from dflop_jax.records import Plan
from dflop_jax.report.columns import ColumnReader
from dflop_jax.report.evaluation_rows import HeldOutRow, read_evaluations
from dflop_jax.report.run_folder import (
    CONFIG,
    METRICS,
    PLAN,
    SIMULATED,
    TRACE,
    metrics_file,
    no_step,
    read_plan,
)
from dflop_jax.report.spent import EVENTS, SpentReader
from dflop_jax.report.summary import RunSummary, summary_of
from dflop_jax.report.tail import Tail

_LOOK_BYTES = 1 << 22  # read of a file before it is looked whether time is up
_MOST_NOTES = 5  # that a reader keeps, of files that may be broken in every line


class _Steps(msgspec.Struct):
    steps: int = 0


class _Config(msgspec.Struct):
    """What is read of a run's config.json."""

    train: _Steps = msgspec.field(default_factory=_Steps)


class RunReader:
    """Reads a run folder's rows as they are appended.

    Args:
      closed: a last row without an end of line is whole, as when nobody writes any more.

    Attributes:
      rows, spent: what its metrics.jsonl and events.jsonl come to.
      notes: what could not be read, with its place.
    """

    def __init__(self, name: str, folder: Path, *, closed: bool = False) -> None:
        self.name, self.folder = name, folder
        self._closed = closed
        self._metrics, self._events = Tail(folder / METRICS), Tail(folder / EVENTS)
        self._begin_rows()
        self._begin_events()
        self.notes: list[str] = []
        self.left_bytes = 0

    def _begin_rows(self) -> None:
        self.rows = ColumnReader(self.folder / METRICS)

    def _begin_events(self) -> None:
        self.spent = SpentReader(self.folder / EVENTS)

    def look(self, in_time: Callable[[], bool] = lambda: True) -> bool:
        """Read what was added, as long as it is `in_time`; whether that was anything.

        A row that is no row is noted and left out, as are rows that a resume has taken back.
        """
        changed, self.left_bytes = False, 0
        for tail, begin in ((self._events, self._begin_events), (self._metrics, self._begin_rows)):
            while True:
                added = tail.read(_LOOK_BYTES, closed=self._closed)
                if added.anew:
                    begin()
                reader = self.spent if tail is self._events else self.rows
                for line in added.lines:
                    try:
                        reader.add(line)
                    except ValueError as e:
                        self._note(str(e))
                changed |= added.anew or bool(added.lines)
                if not added.lines or not in_time():
                    self.left_bytes += added.left_bytes
                    break
        return changed

    def _note(self, text: str) -> None:
        if len(self.notes) < _MOST_NOTES:
            self.notes.append(text)

    def plan(self) -> Plan | None:
        """The run's plan; None before there is one."""
        return read_plan(self.folder) if (self.folder / PLAN).exists() else None

    def n_planned(self) -> int:
        """Steps that the run is to do; 0 where nothing tells."""
        try:
            config = msgspec.json.decode((self.folder / CONFIG).read_bytes(), type=_Config)
        except (OSError, msgspec.DecodeError):
            return 0
        return config.train.steps

    def evaluations(self) -> list[HeldOutRow]:
        return read_evaluations(self.folder)

    def summary(self, plan: Plan | None) -> RunSummary | None:
        """Figures so far, of the run's plan; None before the first step and before there is one."""
        if plan is None or not self.rows.n_steps:
            return None
        return summary_of(self.folder, self.rows.columns(), plan, self.spent.spent())

    def stamp(self) -> tuple[int, ...]:
        """Changes where a plan or a timeline is written."""
        times = []
        for name in (PLAN, TRACE, SIMULATED):
            try:
                times.append(os.stat(self.folder / name).st_mtime_ns)
            except OSError:
                times.append(0)
        return tuple(times)


def read_run(name: str, folder: Path) -> RunReader:
    """All of a run folder that has steps or a timeline.

    Raises:
      ValueError: it holds neither, no plan, or a broken row, named as file:line.
    """
    # Without a timeline there is nothing to show of a run without steps: errors say what to do.
    needs_steps = not any((folder / name).exists() for name in (TRACE, SIMULATED))
    metrics = metrics_file(folder) if needs_steps else folder / METRICS
    reader = RunReader(name, folder, closed=True)
    reader.look()
    if reader.notes:
        raise ValueError(reader.notes[0])
    if needs_steps and not reader.rows.n_steps:
        raise no_step(metrics)
    read_plan(folder)
    return reader
