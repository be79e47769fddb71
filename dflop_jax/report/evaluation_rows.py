"""The rows of a run's evaluations.jsonl, as reports and resumed runs read them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from dflop_jax.report.row_file import last_line, whole_lines

EVALUATIONS = "evaluations.jsonl"


class HeldOutRow(msgspec.Struct):
    """What a report reads of a row of evaluations.jsonl (of `train.evaluate`)."""

    step: int
    loss: float | None
    accuracy: float | None
    by_source: dict[str, dict[str, float | None]] = {}
    answers: dict[str, float | None] = {}


def read_evaluations(folder: str | Path) -> list[HeldOutRow]:
    """The whole rows of a run's evaluations.jsonl; none without it.

    Raises:
      ValueError: one is broken, named as file:line.
    """
    return [*_evaluations(Path(folder) / EVALUATIONS)]


def read_last_evaluation(folder: str | Path) -> HeldOutRow | None:
    """The last row of a run's evaluations.jsonl; None without one.

    Raises:
      ValueError: it is broken, named as file:line.
    """
    path = Path(folder) / EVALUATIONS
    line = last_line(path)
    if line is None:
        return None
    try:
        return msgspec.json.decode(line, type=HeldOutRow)
    except msgspec.DecodeError:
        return [*_evaluations(path)][-1]  # which raises, and names the line


def _evaluations(path: Path) -> Iterator[HeldOutRow]:
    """The whole rows of a file that may be missing; ValueError names the place of a broken one."""
    for n, line in enumerate(whole_lines(path), 1):
        try:
            yield msgspec.json.decode(line, type=HeldOutRow)
        except msgspec.DecodeError as e:
            why = f"not a row of evaluations ({e})"
            raise ValueError(f"{path}:{n}: {why}; remove the line") from None
