"""The rows of a run's evaluations.jsonl, as reports and resumed runs read them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dflop_jax.report.row_file import whole_lines

EVALUATIONS = "evaluations.jsonl"


class HeldOutRow(msgspec.Struct):
    """What a report reads of a row of evaluations.jsonl (of `train.evaluate`)."""

    step: int
    loss: float | None
    accuracy: float | None
    by_source: dict[str, dict[str, float | None]] = {}


def read_evaluations(folder: str | Path) -> list[HeldOutRow]:
    """The whole rows of a run's evaluations.jsonl; none without it.

    Raises:
      ValueError: one is broken, named as file:line.
    """
    path, rows = Path(folder) / EVALUATIONS, []
    for n, line in enumerate(whole_lines(path), 1):
        try:
            rows.append(msgspec.json.decode(line, type=HeldOutRow))
        except msgspec.DecodeError as e:
            why = f"not a row of evaluations ({e})"
            raise ValueError(f"{path}:{n}: {why}; remove the line") from None
    return rows
