"""One self-contained HTML page about runs: charts over their steps, timelines, memory over time,
figures and plans.

The page loads nothing. Its data stand in a script tag as JSON; `page.js` draws timelines (layout,
drawing), `page_charts.js` charts, `page_input.js` zooms and shows details, `page.css` holds the
looks of light and dark. Tables are plain HTML, so they are there without JavaScript.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from dflop_jax.folders import writable_path
from dflop_jax.records import Event, Plan, Trace
from dflop_jax.report.charts import make_charts
from dflop_jax.report.compare import comparison_rows, speedups
from dflop_jax.report.metrics import WARMUP_STEPS
from dflop_jax.report.number_format import number
from dflop_jax.report.panels import Panel, ink_on, legend_entries
from dflop_jax.report.reader import RunRecord
from dflop_jax.report.summary import bucket_text, label_texts, submesh_rows

# Memory of a run's trace: (folder, plan, trace, label of each group) -> submesh -> points
# (time in seconds, bytes per device from then on). ValueError says why it is not known.
MemoryCurves = Callable[
    [Path, Plan, Trace, Mapping[int, str]], Mapping[str, Sequence[tuple[float, float]]]
]


def write_page(
    runs: Sequence[RunRecord], page_path: str | Path, memory: MemoryCurves | None = None
) -> Path:
    """Write the page about runs to `out`; see `page`."""
    text = page(runs, memory)
    with writable_path(page_path, "choose another --out") as path:
        path.write_text(text, encoding="utf-8")
    return path


def page(runs: Sequence[RunRecord], memory: MemoryCurves | None = None) -> str:
    """HTML of one page about runs.

    Timelines are of trace.json and simulated.json, as far as a folder has them; `memory` gives
    their memory over time.

    Raises:
      ValueError: a trace is broken.
    """
    traces = [(run, panel, labels) for run in runs for panel, labels in run.traces]
    legend = legend_entries([panel for _, panel, _ in traces]) if traces else {"idle": ""}
    colours = [
        {"label": label, "colour": c, "ink": ink_on(c)}
        for label, c in legend.items()
        if label != "idle"
    ]
    index = {c["label"]: i for i, c in enumerate(colours)}
    panels = [_panel(run, panel, labels, index, memory) for run, panel, labels in traces]
    *names, last = (run.name for run in runs)
    heading = f"{', '.join(names)} and {last}" if names else last
    runs_with_steps = [run for run in runs if run.rows.n_steps]
    return _TEMPLATES.get_template("page.html").render(
        title=f"{heading} · dflop report",
        heading=heading,
        css=Markup(_read_resource("page.css")),
        script=Markup("".join(map(_read_resource, ("page.js", "page_charts.js", "page_input.js")))),
        colours=colours,
        panels=panels,
        data={"panels": panels, **make_charts(runs)},
        status=[_status(run) for run in runs],
        notes=_notes(runs),
        names=[run.name for run in runs_with_steps],
        speedups=_speedup_rows(runs_with_steps) if runs_with_steps else [],
        figures=comparison_rows(runs_with_steps) if runs_with_steps else [],
        warmup=WARMUP_STEPS,
        plans=[_plan(run.name, run.plan) for run in runs],
    )


def _status(run: RunRecord) -> str:
    """Return a run's name and number of steps as text."""
    planned, n_done = run.config.get("train", {}).get("steps", 0), run.rows.n_steps
    total_text = f" of {planned:,}" if planned else ""
    return f"{run.name}: {n_done:,} steps" + total_text * (n_done != planned)


def _read_resource(name: str) -> str:
    return resources.files("dflop_jax.report").joinpath(name).read_text(encoding="utf-8")


_TEMPLATES = Environment(
    loader=FunctionLoader(_read_resource),
    autoescape=True,
    trim_blocks=True,
    undefined=StrictUndefined,
)


def _notes(runs: Sequence[RunRecord]) -> list[str]:
    notes = [
        f"{r.name}: simulated, no step trained; figures come with a training run."
        for r in runs
        if not r.rows.n_steps
    ]
    return notes + [
        f"{r.name}: no trace, so no timeline; a run writes its trace when it ends."
        for r in runs
        if not r.traces
    ]


def _speedup_rows(runs: Sequence[RunRecord]) -> list[dict[str, str]]:
    return [
        {
            "name": run.name,
            "step": f"{number(1e3 * run.rows.median('step_s'))} ms",
            "speedup": ""
            if run is runs[0] or math.isnan(speedup)
            else f"{number(speedup)} × as fast as {runs[0].name}",
        }
        for run, speedup in zip(runs, speedups(runs))
    ]


def _plan(name: str, plan: Plan) -> dict[str, Any]:
    scheduling = plan.scheduling
    return {
        "name": name,
        "text": f"policy {plan.policy} · order {scheduling.order}, "
        f"lookahead {scheduling.lookahead} · {scheduling.grouping} grouping, "
        f"{plan.layout.group_size} a group",
        "submeshes": submesh_rows(plan.layout),
        "buckets": [bucket_text(b) for b in plan.layout.buckets],
    }


def _panel(
    run: RunRecord,
    panel: Panel,
    labels: Mapping[int, str],
    colours: Mapping[str, int],
    memory: MemoryCurves | None,
) -> dict[str, Any]:
    """What page.js draws of a trace; a task is [row, start_s, end_s, colour, segment, direction,
    group, bucket]."""
    trace, rows, links = panel.trace, panel.rows, panel.links
    row_number = {name: i for i, name in enumerate(rows)}
    busy = trace.busy_fraction()
    texts = label_texts(run.plan.layout)
    shade = {e: colours[panel.label(e)] for e in trace.events}
    curves, note = _memory(run.folder, run.plan, trace, labels, memory)
    return {
        "title": panel.title,
        "makespan_s": trace.makespan_s,
        "note": note,
        "rows": [
            {"name": name, "busy": f"{busy.get(name, 0.0):.0%}", "link": name in links}
            for name in rows
        ],
        "tasks": [
            [
                row_number[e.submesh],
                e.start_s,
                e.end_s,
                shade[e],
                e.segment,
                e.direction,
                e.group,
                texts.get(labels.get(e.group, ""), labels.get(e.group, "")),
            ]
            for e in trace.events
        ],
        "memory": [
            {
                "name": name,
                "colour": _most_used_colour([e for e in trace.events if e.submesh == name], shade),
                "peak": max(n_bytes for _, n_bytes in points),
                "times_s": [time_s for time_s, _ in points],
                "bytes": [n_bytes for _, n_bytes in points],
            }
            for name, points in curves.items()
        ],
    }


def _memory(
    folder: Path, plan: Plan, trace: Trace, labels: Mapping[int, str], memory: MemoryCurves | None
) -> tuple[Mapping[str, Sequence[tuple[float, float]]], str]:
    """Return the memory curves and "", or no curves and the reason."""
    if memory is None:
        return {}, ""
    try:
        return memory(folder, plan, trace, labels), ""
    except ValueError as e:
        return {}, f"memory over time is not known: {' '.join(str(e).split())}"


def _most_used_colour(events: Sequence[Event], shade: Mapping[Event, int]) -> int:
    """The colour that fills most of a submesh's row."""
    seconds_by_colour: dict[int, float] = {}
    for e in events:
        seconds_by_colour[shade[e]] = seconds_by_colour.get(shade[e], 0.0) + e.end_s - e.start_s
    return max(seconds_by_colour, key=lambda c: seconds_by_colour[c], default=0)
