"""The sampled steps of a run, in corrections.jsonl of its folder: what its schedules follow beside
configuration and data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from dflop_jax.report.run_folder import SAMPLES, keep_rows, whole_lines
from dflop_jax.schedule.learnt import Sample


class SampleFile:
    """Reads, adds and drops sampled steps; `known` are those that it held when it was opened. A
    last line that a kill cut short counts for nothing.

    Raises:
      ValueError: a line is broken, named as file:line.
    """

    def __init__(self, folder: Path):
        self._path = folder / SAMPLES
        lines = whole_lines(self._path)
        self.known = tuple(self._sample(line, n) for n, line in enumerate(lines, 1))

    def _sample(self, line: bytes, n: int) -> Sample:
        try:
            return msgspec.json.decode(line, type=Sample)
        except msgspec.DecodeError as e:
            raise ValueError(
                f"{self._path}:{n}: not a sampled step ({e}); remove the line, and schedules of "
                "steps that are run anew follow new times"
            ) from None

    def append(self, sample: Sample) -> None:
        """Add a row; it is on its way to disk when this returns."""
        with self._path.open("ab") as f:
            f.write(msgspec.json.encode(sample) + b"\n")

    def keep(self, wanted: Callable[[Sample], bool]) -> None:
        """Drop all others, and a line that was cut short."""
        self.known = tuple(filter(wanted, self.known))
        kept = {(s.step, s.prices) for s in self.known}
        keep_rows(self._path, lambda row: (row["step"], row["prices"]) in kept)
