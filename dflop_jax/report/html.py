"""One self-contained HTML page about runs: charts over their steps, timelines, memory over time,
figures and plans.

The page loads no other files. Its data are JSON in a script tag; `page.js` draws timelines,
`page_charts.js` charts, and `page_input.js` zooms and shows details. Tables are plain HTML.
"""

from __future__ import annotations

import math
from collections import Counter
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
from dflop_jax.report.summary import (
    baseline_lines,
    bucket_text,
    shape_text,
    submesh_rows,
    trial_lines,
)

# Computes memory over time in a trace: (folder, plan, trace, label of each group) -> submesh ->
# points (time in seconds, bytes per device from then on). ValueError says why it is unknown.
MemoryCurves = Callable[
    [Path, Plan, Trace, Mapping[int, str]], Mapping[str, Sequence[tuple[float, float]]]
]


def write_page(
    runs: Sequence[RunRecord], page_path: str | Path, memory: MemoryCurves | None = None
) -> Path:
    """Write the page about runs; see `page`."""
    text = page(runs, memory)
    with writable_path(page_path, "choose another --out") as path:
        path.write_text(text, encoding="utf-8")
    return path


def page(runs: Sequence[RunRecord], memory: MemoryCurves | None = None) -> str:
    """Return the HTML of one page about runs; `memory` computes memory over time in a trace."""
    traces = [(run, panel, labels) for run in runs for panel, labels in run.traces]
    legend = legend_entries([panel for _, panel, _ in traces]) if traces else {"idle": ""}
    del legend["idle"]
    colours = [{"label": k, "colour": c, "ink": ink_on(c)} for k, c in legend.items()]
    index = {c["label"]: i for i, c in enumerate(colours)}
    panels = [_panel(run, panel, labels, index, memory) for run, panel, labels in traces]
    *names, last = (run.name for run in runs)
    heading = f"{', '.join(names)} and {last}" if names else last
    runs_with_steps = [run for run in runs if run.rows.n_steps]
    status = []
    for run in runs:
        planned, n_done = run.config.get("train", {}).get("steps", 0), run.rows.n_steps
        total_text = f" of {planned:,}" * (planned not in (0, n_done))
        status.append(f"{run.name}: {n_done:,} steps{total_text}")
        status += [f"{run.name}: {line}" for line in baseline_lines(run)]
    untrained = "simulated, no step trained; figures come with a training run."
    untraced = "no trace, so no timeline; a run writes its trace when it ends."
    notes = [f"{run.name}: {untrained}" for run in runs if not run.rows.n_steps]
    notes += [f"{run.name}: {untraced}" for run in runs if not run.traces]
    return _TEMPLATES.get_template("page.html").render(
        title=f"{heading} · dflop report",
        heading=heading,
        css=Markup(_read_resource("page.css")),
        script=Markup("".join(map(_read_resource, ("page.js", "page_charts.js", "page_input.js")))),
        colours=colours,
        panels=panels,
        data={"panels": panels, **make_charts(runs)},
        status=status,
        notes=notes,
        names=[run.name for run in runs_with_steps],
        speedups=_speedup_rows(runs_with_steps) if runs_with_steps else [],
        figures=comparison_rows(runs_with_steps) if runs_with_steps else [],
        warmup=WARMUP_STEPS,
        plans=[_plan(run.name, run.plan) for run in runs],
    )


def _read_resource(name: str) -> str:
    return resources.files("dflop_jax.report").joinpath(name).read_text(encoding="utf-8")


_TEMPLATES = Environment(
    loader=FunctionLoader(_read_resource),
    autoescape=True,
    trim_blocks=True,
    undefined=StrictUndefined,
)


def _speedup_rows(runs: Sequence[RunRecord]) -> list[dict[str, str]]:
    rows = []
    for run, speedup in zip(runs, speedups(runs)):
        is_compared = run is not runs[0] and not math.isnan(speedup)
        text = f"{number(speedup)} × as fast as {runs[0].name}" if is_compared else ""
        step = f"{number(1e3 * run.rows.median('step_s'))} ms"
        rows.append({"name": run.name, "step": step, "speedup": text})
    return rows


def _plan(name: str, plan: Plan) -> dict[str, Any]:
    scheduling = plan.scheduling
    return {
        "name": name,
        "text": f"policy {plan.policy} · order {scheduling.order}, "
        f"lookahead {scheduling.lookahead} · {scheduling.grouping} grouping, "
        f"{plan.layout.group_size} a group",
        "submeshes": submesh_rows(plan.layout),
        "buckets": [bucket_text(b) for b in plan.layout.buckets],
        "trials": trial_lines(plan),
    }


def _panel(
    run: RunRecord,
    panel: Panel,
    labels: Mapping[int, str],
    colours: Mapping[str, int],
    memory: MemoryCurves | None,
) -> dict[str, Any]:
    """Return the data from which page.js draws a trace."""
    trace, rows, links = panel.trace, panel.rows, panel.links
    row_number = {name: i for i, name in enumerate(rows)}
    busy = trace.busy_fraction()
    layout = run.plan.layout
    shapes = [(module, shape) for module in layout.modules for shape in layout.shapes(module)]
    texts = {f"{m}:{shape.name}": f"{shape_text(m, shape)} tokens" for m, shape in shapes}
    bucket_of = {group: texts.get(label, label) for group, label in labels.items()}
    shade = {e: colours[panel.label(e)] for e in trace.events}
    curves: Mapping[str, Sequence[tuple[float, float]]] = {}
    note = ""
    try:
        curves = memory(run.folder, run.plan, trace, labels) if memory else {}
    except ValueError as e:
        note = f"memory over time is not known: {' '.join(str(e).split())}"
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
                bucket_of.get(e.group, ""),
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


def _most_used_colour(events: Sequence[Event], shade: Mapping[Event, int]) -> int:
    """Return the colour that fills most of a submesh's row."""
    seconds: Counter[int] = Counter()
    for e in events:
        seconds[shade[e]] += e.end_s - e.start_s  # type: ignore[assignment]
    return max(seconds, key=lambda colour: seconds[colour], default=0)
