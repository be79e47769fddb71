"""The sampled steps of a run, in corrections.jsonl of its folder: what its schedules follow beside
configuration and data."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dflop_jax.report.row_file import RowFile, RowKey, read_rows
from dflop_jax.schedule.learnt import StepSample


class SampleFile:
    """Reads, adds and drops sampled steps. A last line that a kill cut short counts for nothing.

    Raises:
      ValueError: a line is broken, named as file:line.
    """

    def __init__(self, rows: RowFile):
        self._rows = rows
        for _ in self.read():
            pass

    def read(self) -> Iterator[StepSample]:
        """Every sample, in the order in which they were added."""
        remedy = "remove the line, and schedules of steps that are run anew follow new times"
        return read_rows(self._rows.path, StepSample, "a sampled step", remedy)

    def append(self, sample: StepSample) -> None:
        """Add a row; see `RowFile.append`."""
        self._rows.append(sample)

    def keep(self, wanted: Callable[[RowKey], bool]) -> None:
        """Drop all others, and a line that was cut short."""
        self._rows.keep(wanted)
