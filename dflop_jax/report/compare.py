"""Several runs in one table and one picture; speed-ups are relative to the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from dflop_jax.folders import writing
from dflop_jax.report.panels import Panel
from dflop_jax.report.run_folder import CONFIG
from dflop_jax.report.summary import RunSummary, figures, loss_curve, summarise, trace_panels
from dflop_jax.report.wording import number

SPEEDUP = "speed-up"  # the label of the first figure of a comparison
_STEP_FIELDS = (
    ("model", "factory"), ("model", "size"), ("data", "path"), ("data", "factory"),
    ("train", "global_batch"),
)  # fmt: skip


def compare(folders: Sequence[Path], out: Path, only: Sequence[str] = ()) -> Table:
    """Table of the runs' figures, a column per run; the picture goes to `out` (a .png).

    Args:
      only: how the labels of the figures begin that are shown; () for all.

    The picture holds one timeline per run (its measured trace, else its first one) under a common
    time axis, and all loss curves.

    Raises:
      ValueError: no folder, one that is not a run folder with at least a step, or `out` cannot be
        written.
    """
    from dflop_jax.report.timeline import draw

    runs = _runs(folders)
    panels = [p for name, (folder, _) in runs.items() for p in _chosen(folder, name)]
    curves = {name: loss_curve(folder) for name, (folder, _) in runs.items()}
    with writing(out, "choose another --out") as picture:
        draw(panels, curves, picture)

    table = Table(show_edge=False, pad_edge=False)
    table.add_column("figure")
    for name in runs:
        table.add_column(escape(name), justify="right", overflow="fold")
    for label, cells in compared([s for _, s in runs.values()]):
        if only and not label.startswith(tuple(only)):
            continue
        style = "bold" if label == SPEEDUP else None
        table.add_row(escape(label), *map(escape, cells), style=style)
    return table


def compared(summaries: Sequence[RunSummary]) -> list[tuple[str, list[str]]]:
    """(label, a text per run): speed-ups, then every figure that any of the runs has."""
    cells = [dict(figures(s)) for s in summaries]
    ups = speedups(summaries)
    rows = [(SPEEDUP, ["-" if math.isnan(up) else f"{number(up)} x" for up in ups])]
    return rows + [(label, [c.get(label, "-") for c in cells]) for label in _labels(cells)]


def compare_json(folders: Sequence[Path]) -> dict[str, Any]:
    """The same figures for programs: {"runs": [{..., "speedup": ...}]}, unknown ones null."""
    runs = _runs(folders)
    ups = speedups([s for _, s in runs.values()])
    return {
        "runs": [
            _finite(asdict(s)) | {"name": name, "speedup": _finite(up)}
            for (name, (_, s)), up in zip(runs.items(), ups)
        ]
    }


def run_names(folders: Sequence[Path]) -> dict[str, Path]:
    """Runs by a name that tells them apart: the folder's, or its path where that repeats.

    Raises:
      ValueError: no folder.
    """
    if not folders:
        raise ValueError("no run folder given; name at least one, for example runs/demo/dflop")
    paths = list(dict.fromkeys(Path(f) for f in folders))
    short = [p.resolve().name for p in paths]
    return {s if short.count(s) == 1 else str(p): p for s, p in zip(short, paths)}


def _runs(folders: Sequence[Path]) -> dict[str, tuple[Path, RunSummary]]:
    return {name: (path, summarise(path)) for name, path in run_names(folders).items()}


def _chosen(folder: Path, name: str) -> list[Panel]:
    """The run's panel in a comparison, none without a trace."""
    panels = trace_panels(folder, name)
    return [p for p in panels if p.trace.source == "measured"][:1] or panels[:1]


def speedups(summaries: Sequence[RunSummary]) -> list[float]:
    """Median step time of the first run over each run's; nan for a run of another model, other data
    or another global batch, whose steps are other work."""
    base, work = summaries[0].step_s.median, _work(summaries[0])
    return [
        base / s.step_s.median if s.step_s.median > 0 and _work(s) == work else math.nan
        for s in summaries
    ]


def _work(summary: RunSummary) -> list[Any]:
    """What a step of a run is of, as its configuration says; empty where there is none."""
    try:
        config = msgspec.json.decode(Path(summary.folder, CONFIG).read_bytes())
        return [config[section][name] for section, name in _STEP_FIELDS]
    except (OSError, msgspec.DecodeError, LookupError, TypeError):
        return []


def _labels(cells: Sequence[dict[str, str]]) -> list[str]:
    """All labels, in the runs' own order: one that a run adds follows its neighbour there."""
    order: list[str] = []
    for cell in cells:
        place = 0
        for label in cell:
            if label not in order:
                order.insert(place, label)
            place = order.index(label) + 1
    return order


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
