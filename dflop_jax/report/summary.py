"""What one run came to: figures from its folder, as records, a terminal table and summary.md.

Steady figures (times, rates, fractions) are medians that leave the first `WARMUP_STEPS` steps out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dflop_jax.records import AXES, Bucket, Layout, Shape
from dflop_jax.report.metrics import KEYED, WARMUP_STEPS, Spread, StepFigures, spread
from dflop_jax.report.reader import RunRecord, read_run
from dflop_jax.report.run_folder import LOSS, METRICS, SUMMARY, TIMELINE, TRACE, HeldOutRow, no_step
from dflop_jax.report.spent import TRAINING, Spent, read_spent
from dflop_jax.report.wording import duration, flops_text, number, percent


@dataclass(frozen=True)
class RunSummary(StepFigures):
    """Figures of one run, those of its median step among them; nan where the run did not measure
    one.

    `makespan_chosen_by_s` is the mean step by which the planner chose the plan,
    `makespan_predicted_s` that by the plan's own programs. `busy_predicted` is the planner's,
    `busy_measured` the run's, per submesh. `schedule_gap` is the median over steps of how much
    longer the schedule is than its proved bound; `made_by` counts schedules by what found them,
    `n_integer` those of which an integer program proved a bound. `held_out` are loss and token
    accuracy of the last evaluation: by "" of all held-out samples, and by the name of each dataset
    of a mixture.
    `steps_lost` are steps between the first and the last whose row found no room on the disk.
    `spent` is where the run's time went, None where nothing tells.
    """

    name: str
    folder: str
    policy: str
    n_steps: int
    steps_lost: int
    step_s: Spread
    busy_predicted: dict[str, float]
    busy_measured: dict[str, float]
    makespan_chosen_by_s: float
    makespan_predicted_s: float
    schedule_gap: float
    made_by: dict[str, int]
    n_integer: int
    compiles_after_warmup: int
    schedule_wait_s: float
    loss_first: float
    loss_last: float
    n_bad: int
    n_skipped: int
    held_out: dict[str, tuple[float, float]]
    submeshes: list[str]
    buckets: list[str]
    spent: Spent | None


def summarise(folder: str | Path) -> RunSummary:
    """The figures of a run folder.

    Raises:
      ValueError: no such folder, no step in its metrics, or a broken or missing plan.
    """
    return summary_of(read_run(folder))


def summary_of(run: RunRecord) -> RunSummary:
    """The figures of a run; ValueError where it did no step."""
    rows, plan = run.rows, run.plan
    if not rows.n_steps:
        raise no_step(run.folder / METRICS)

    steps, losses = rows.of("step"), rows.of("loss")
    of_step: dict[str, Any] = {
        name: rows.medians(name) if name in KEYED else rows.median(name)
        for name in (f.name for f in fields(StepFigures))
    }
    return RunSummary(
        name=run.name,
        folder=str(run.folder),
        policy=plan.policy,
        n_steps=rows.n_steps,
        steps_lost=max(0, int(steps[-1] + 1 - steps[0]) - rows.n_steps),
        step_s=spread(rows.steady("step_s")),
        busy_predicted=plan.predicted.busy_fraction,
        busy_measured=rows.medians("busy_fraction"),
        makespan_chosen_by_s=plan.predicted.chosen_by_s or math.nan,
        makespan_predicted_s=plan.predicted.makespan_s or math.nan,
        schedule_gap=rows.median("schedule_gap"),
        made_by=dict(rows.made_by.most_common()),
        n_integer=int((rows.of("integer_bound_s") > 0).sum()),
        compiles_after_warmup=int(np.nansum(rows.of("compiles")[WARMUP_STEPS:])),
        schedule_wait_s=float(np.nansum(rows.steady("schedule_wait_s"))),
        loss_first=float(losses[0]),
        loss_last=float(losses[-1]),
        n_bad=int(np.nansum(rows.of("n_bad"))),
        n_skipped=rows.n_skipped,
        held_out=_held_out(run.evaluations[-1]) if run.evaluations else {},
        submeshes=_submesh_texts(plan.layout),
        buckets=[bucket_text(b) for b in plan.layout.buckets],
        spent=read_spent(run.folder),
        **of_step,
    )


def _held_out(row: HeldOutRow) -> dict[str, tuple[float, float]]:
    named = {"": {"loss": row.loss, "accuracy": row.accuracy}, **row.by_source}
    return {
        name: (_or_nan(losses.get("loss")), _or_nan(losses.get("accuracy")))
        for name, losses in named.items()
    }


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def shape_text(module: str, shape: Shape) -> str:
    """Rows and tokens of a module's microbatch on one data rank."""
    return f"{module} {shape.rows} x {shape.tokens}"


def label_texts(layout: Layout) -> dict[str, str]:
    """What the labels of groups (see `report.trace`) say at length."""
    return {
        f"{m}:{s.name}": f"{shape_text(m, s)} tokens"
        for m in layout.modules
        for s in layout.shapes(m)
    }


def bucket_text(bucket: Bucket) -> str:
    """Rows and tokens of every module of a bucket."""
    return ", ".join(shape_text(m, s) for m, s in bucket.shapes) + " tokens"


def submesh_rows(layout: Layout) -> list[tuple[str, str, str, str]]:
    """(name, devices, sizes of the mesh's axes, layers) of each submesh."""
    layers: dict[str, list[str]] = {m.name: [] for m in layout.submeshes}
    for s in layout.segments:
        rounds = f" in {s.rounds} rounds" if s.rounds > 1 else ""
        layers[s.submesh].append(f"{s.module} {_span(s.start, s.stop)}{rounds}")
    return [
        (
            m.name,
            _span(m.first, m.devices.stop),
            " × ".join(map(str, m.sizes)),
            ", ".join(layers[m.name]) or "none",
        )
        for m in layout.submeshes
    ]


def _span(first: int, stop: int) -> str:
    return f"{first}–{stop - 1}" if stop - first > 1 else str(first)


def _submesh_texts(layout: Layout) -> list[str]:
    return [
        f"{name}: devices {devices} as {' × '.join(AXES)} {shape}, layers {layers}"
        for name, devices, shape, layers in submesh_rows(layout)
    ]


def figures(s: RunSummary) -> list[tuple[str, str]]:
    """(label, text) of a run's figures: the rows of its own table and of a comparison."""
    ms = 1e3
    t = s.step_s
    rows = [
        ("policy", s.policy),
        ("steps", str(s.n_steps)),
        *([("steps without a row", str(s.steps_lost))] if s.steps_lost else []),
        ("step time, median", f"{number(t.median * ms)} ms"),
        ("step time, p10 - p90", f"{number(t.p10 * ms)} - {number(t.p90 * ms)} ms"),
        ("tokens / s", number(s.tokens_per_s)),
        ("model FLOP a step", flops_text(s.model_flops)),
        ("model FLOP / s", flops_text(s.flops_per_s)),
        *((f"model FLOP / s, {m}", flops_text(v)) for m, v in s.flops_per_s_by_module.items()),
        ("MFU", percent(s.mfu)),
        *((f"MFU, {m}", percent(v)) for m, v in s.mfu_by_module.items()),
    ]
    rows += [(f"padding, {k}", percent(v)) for k, v in s.padding_fraction.items()]
    rows += [(f"imbalance, {k}", percent(v)) for k, v in s.imbalance.items()]
    rows += [(f"{k}, of a step", f"{number(v * ms)} ms") for k, v in s.phase_s.items()]
    rows += [(f"memory, {k}", f"{number(v / 2**30)} GiB") for k, v in s.memory_bytes.items()]
    for name, n_bytes in s.moved_in_node.items():
        both = (f"{number(v / 1e6)} MB" for v in (n_bytes, s.moved_across_nodes[name]))
        rows.append((f"features moved {name}, in nodes / across", " / ".join(both)))
    for name in dict.fromkeys([*s.busy_predicted, *s.busy_measured]):
        both = (percent(d.get(name, math.nan)) for d in (s.busy_predicted, s.busy_measured))
        rows.append((f"busy {name}, predicted / measured", " / ".join(both)))
    return [
        *rows,
        ("step predicted, chosen by", f"{number(s.makespan_chosen_by_s * ms)} ms"),
        ("step predicted, own programs", f"{number(s.makespan_predicted_s * ms)} ms"),
        ("makespan, scheduled", f"{number(s.makespan_s * ms)} ms"),
        ("schedule over its proved bound", percent(s.schedule_gap)),
        ("schedules found by", ", ".join(f"{k} {n}" for k, n in s.made_by.items())),
        ("integer program solved", f"in {s.n_integer} of {s.n_steps} steps"),
        ("compiles after warm-up", str(s.compiles_after_warmup)),
        ("schedule solved in", f"{number(s.schedule_s * ms)} ms"),
        ("schedule waited for, total", f"{number(s.schedule_wait_s * ms)} ms"),
        ("loss, first -> last", f"{number(s.loss_first)} -> {number(s.loss_last)}"),
        *(
            (f"held out{name and f', {name}'}: loss / accuracy", f"{number(a)} / {percent(b)}")
            for name, (a, b) in s.held_out.items()
        ),
        *((f"own metric {name}, median", number(v)) for name, v in s.own.items()),
        ("samples replaced", str(s.n_bad)),
        ("steps that changed no parameter", str(s.n_skipped)),
        *(_spent_figures(s.spent) if s.spent else ()),
    ]


def _spent_figures(spent: Spent) -> list[tuple[str, str]]:
    """Where a run's time went."""
    rows = [
        ("wall time, starts", f"{duration(spent.wall_s)}, {spent.starts}"),
        ("goodput: time of steps that count", percent(spent.goodput)),
    ]
    shares = spent.shares()
    shares.pop(TRAINING, None)
    return rows + [(f"time of {part}", percent(share)) for part, share in shares.items()]


def summary_table(s: RunSummary) -> Group:
    """What the terminal shows of one run: its figures, its plan and where its pictures are."""
    table = Table(title=f"run {s.name}", title_justify="left", show_header=False)
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right")
    for label, text in figures(s):
        table.add_row(escape(label), escape(text))
    lines = [f"submesh {text}" for text in s.submeshes]
    lines += [f"bucket {text} per data rank" for text in s.buckets]
    files = (Path(s.folder) / name for name in (TIMELINE, LOSS, SUMMARY))
    lines += [str(path) for path in files if path.exists()]
    return Group(table, *(Text(line) for line in lines))


def markdown(s: RunSummary, pictures: list[str]) -> str:
    """summary.md: figures, plan, pictures (file names beside it)."""
    lines = [f"# Run {s.name}", "", "| figure | value |", "|---|---:|"]
    lines += [f"| {label} | {text} |" for label, text in figures(s)]
    note = f"Medians leave out the first {WARMUP_STEPS} steps, which warm up."
    lines += ["", note, "", "## Plan", ""]
    lines += [f"- submesh {text}" for text in s.submeshes]
    lines += [f"- bucket {text} per data rank" for text in s.buckets]
    lines += ["", "## Pictures", ""] if pictures else []
    lines += [f"![{name}]({name})\n" for name in pictures]
    if TIMELINE in pictures:
        lines.append(f"Open `{TRACE}` at https://ui.perfetto.dev to look closer.")
    return "\n".join(lines).rstrip() + "\n"


def write_summary(folder: str | Path) -> RunSummary:
    """Write timeline.png (when there is a trace), loss.png and summary.md; return the figures."""
    from dflop_jax.report.timeline import draw

    run = read_run(folder)
    summary, panels = summary_of(run), run.panels
    if panels:
        draw(panels, {}, run.folder / TIMELINE)
    draw([], {summary.name: run.rows.curve()}, run.folder / LOSS)
    text = markdown(summary, [TIMELINE, LOSS] if panels else [LOSS])
    (run.folder / SUMMARY).write_text(text, encoding="utf-8")
    return summary
