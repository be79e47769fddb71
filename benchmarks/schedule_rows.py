"""Rows of `benchmarks/schedule.py`: ratios, merging, the table, the picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.table import Table

SAME = 1e-9  # relative difference of equal makespans


@dataclass(frozen=True)
class Row:
    """One method on one instance; `None` where it found no assignment."""

    n: int
    bins: int
    instance: str
    method: str
    makespan_over_bound: float | None
    ms: float
    seed: int
    status: str
    makespan: float | None
    bound: float

    @property
    def case(self) -> tuple[int, int, str, int]:
        return self.n, self.bins, self.instance, self.seed


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Each instance's makespans over the best bound that any of its rows has."""
    best: dict[tuple[int, int, str, int], float] = {}
    for r in rows:
        best[r.case] = max(best.get(r.case, 0.0), r.bound)
    return [
        replace(
            r,
            bound=best[r.case],
            makespan_over_bound=None if r.makespan is None else r.makespan / best[r.case],
        )
        for r in rows
    ]


def merged(paths: Sequence[Path]) -> list[Row]:
    """Rows of several files by size; of a method's runs on one instance the last stays.

    Raises:
      ValueError: a file that --json did not make.
    """
    rows: dict[tuple[object, ...], Row] = {}
    for path in paths:
        try:
            for fields in json.loads(path.read_text()):
                row = Row(**fields)
                rows[*row.case, row.method] = row
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: not rows that --json wrote ({error})") from error
    return with_ratios(sorted(rows.values(), key=lambda r: (r.n, r.bins)))


def versus(rows: Sequence[Row], rival: str) -> Iterator[str]:
    """How often each of our runs is better than, equal to and worse than the rival method."""
    spans = {(*r.case, r.method): np.inf if r.makespan is None else r.makespan for r in rows}
    theirs = {r.case: spans[*r.case, rival] for r in rows if r.method == rival}
    for method in dict.fromkeys(r.method for r in rows if r.method.startswith("ours")):
        pairs = [(spans[*c, method], t) for c, t in theirs.items() if (*c, method) in spans]
        if pairs:
            better = sum(o < t * (1 - SAME) for o, t in pairs)
            worse = sum(o > t * (1 + SAME) for o, t in pairs)
            equal = len(pairs) - better - worse
            yield f"{method} against {rival}: {better} better, {equal} equal, {worse} worse"


def table(rows: list[Row]) -> Table:
    """One line per instance and size; a cell is median / worst ratio and median milliseconds."""
    found = list(dict.fromkeys(r.method for r in rows))
    out = Table("samples x bins", "instance", *found, title="makespan over lower bound (worst) ms")
    for key in dict.fromkeys((r.n, r.bins, r.instance) for r in rows):
        cells = []
        for method in found:
            some = [r for r in rows if (r.n, r.bins, r.instance) == key and r.method == method]
            of = ratios(some)
            ms = np.median([r.ms for r in some]) if some else 0
            cells.append(f"{shown(np.median(of))} ({shown(max(of))}) {ms:.0f}" if some else "-")
        out.add_row(f"{key[0]} x {key[1]}", key[2], *cells)
    return out


def ratios(rows: Sequence[Row]) -> list[float]:
    return [np.inf if r.makespan_over_bound is None else r.makespan_over_bound for r in rows]


def shown(ratio: float) -> str:
    return f"{ratio:.4f}" if np.isfinite(ratio) else "none"


def plot(rows: list[Row], path: Path) -> None:
    """Excess over the bound by method, one panel per instance kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys(r.instance for r in rows))
    sizes = list(dict.fromkeys((r.n, r.bins) for r in rows))
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(3.4 * len(kinds), 3.2), sharey=True)
    for axis, kind in zip(np.atleast_1d(axes), kinds, strict=True):
        for method in dict.fromkeys(r.method for r in rows):
            some = [
                ratios(
                    [r for r in rows if (r.instance, r.method, r.n, r.bins) == (kind, method, *s)]
                )
                for s in sizes
            ]
            excess = [np.median(e) - 1 if e else np.inf for e in some]
            median = [max(e, 1e-5) if np.isfinite(e) else np.nan for e in excess]
            axis.plot(range(len(sizes)), median, "o-", label=method, markersize=4)
        axis.set_title(kind)
        axis.set_xticks(range(len(sizes)), [f"{n}x{b}" for n, b in sizes], rotation=40)
        axis.set_yscale("log")
    np.atleast_1d(axes)[0].set_ylabel("makespan over bound - 1 (median)")
    np.atleast_1d(axes)[-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
