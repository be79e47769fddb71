"""The figures of one run, for the terminal, summary.md, comparisons and pages.

Times, rates and fractions are medians without the first `WARMUP_STEPS` steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dflop_jax.records import (
    ARRIVAL_ORDER,
    AXES,
    FSDP,
    LONGEST_FIRST,
    Bucket,
    Layout,
    Plan,
    Shape,
)
from dflop_jax.report import run_folder
from dflop_jax.report.memory_growth import fit_growth
from dflop_jax.report.metrics import (
    COLUMNS,
    HOST_BYTES,
    KEYED_FIELDS,
    LIVE_BYTES,
    PEAK_BYTES,
    PEAK_UPPER_BOUND,
    WARMUP_STEPS,
    percentiles,
)
from dflop_jax.report.number_format import duration, flops_text, number, percent
from dflop_jax.report.reader import RunRecord, read_run
from dflop_jax.report.run_folder import LOSS, SUMMARY, TIMELINE, EvaluationRow
from dflop_jax.report.wall_time import TRAINING, WallTime

# Formatters of fractions, FLOPs and a run's seconds; for other units, the unit is a suffix.
_UNIT_FORMATS = {"%": percent, "FLOP": flops_text, "s": duration}
# Unit of a column of metrics -> the unit of its figure, and the factor between them.
_DISPLAY_UNITS = {"s": ("ms", 1e3), "bytes": ("GiB", 2.0**-30), "FLOP/s": ("FLOP", 1.0)}
_MEMORY_LABELS = {
    LIVE_BYTES: "memory, live",
    PEAK_BYTES: "memory, peak since training began",
    PEAK_UPPER_BOUND: "memory, peak, at most",
    HOST_BYTES: "memory, host",
}


@dataclass(frozen=True)
class Figure:
    """One or several related numbers of a run with a label; nan if unknown."""

    label: str
    unit: str  # "ms", "GiB", "MB", "FLOP", "s", "%" (of 1), or ""
    values: tuple[float | str, ...]
    between: str = " / "

    @property
    def text(self) -> str:
        return self.between.join(map(self._text, self.values))

    def _text(self, value: float | str) -> str:
        if isinstance(value, str | int):
            return str(value)
        if text := _UNIT_FORMATS.get(self.unit):
            return text(value)
        return f"{number(value)} {self.unit}".rstrip()


def figures(run: RunRecord) -> list[Figure]:
    """Return the figures of a run; ValueError: it has no step. There are two predicted step times:
    the one by which the planner chose the plan, and the one from timings of the plan's own
    programs. Rows are missing for steps at which the disk was full."""
    rows, predicted = run.rows, run.plan.predicted
    if not rows.n_steps:
        raise run_folder.no_step_error(run.folder / run_folder.METRICS)

    def one(label: str, *values: float | str, unit: str = "", between: str = " / ") -> Figure:
        return Figure(label, unit, values, between)

    def medians(*names: str) -> Iterator[Figure]:
        for name in names:
            label, unit = COLUMNS[name].label, COLUMNS[name].unit
            unit, scale = _DISPLAY_UNITS.get(unit, (unit, 1.0))
            is_keyed = name in KEYED_FIELDS
            values = rows.medians(name) if is_keyed else {"": rows.median(name)}
            for key, value in values.items():
                yield one(label.format(key), scale * value, unit=unit)

    steps, losses = rows.column("step"), rows.column("loss")
    step_s = percentiles(rows.after_warmup("step_s"))
    n_lost = max(0, int(steps[-1] + 1 - steps[0]) - rows.n_steps)
    waited_ms = 1e3 * float(np.nansum(rows.after_warmup("schedule_wait_s")))
    n_bounded = int((rows.column("integer_bound_s") > 0).sum())
    across = rows.medians("moved_across_nodes")
    busy = predicted.busy_fraction, rows.medians("busy_fraction")
    return [
        one("policy", run.plan.policy),
        one("steps", rows.n_steps),
        *([one("steps without a row", n_lost)] if n_lost else []),
        one("step time, median", 1e3 * step_s.median, unit="ms"),
        one("step time, p10 - p90", 1e3 * step_s.p10, 1e3 * step_s.p90, unit="ms", between=" - "),
        *medians("tokens_per_s", "model_flops", "flops_per_s", "flops_per_s_by_module"),
        *medians("mfu", "mfu_by_module", "padding_fraction", "imbalance", "phase_s"),
        *_memory_figures(run),
        *(
            one(f"features moved {k}, in nodes / across", v / 1e6, across[k] / 1e6, unit="MB")
            for k, v in rows.medians("moved_in_node").items()
        ),
        *(
            one(f"busy {k}, predicted / measured", *(d.get(k, math.nan) for d in busy), unit="%")
            for k in dict.fromkeys([*busy[0], *busy[1]])
        ),
        one("step predicted, chosen by", 1e3 * (predicted.chosen_by_s or math.nan), unit="ms"),
        one("step predicted, own programs", 1e3 * (predicted.makespan_s or math.nan), unit="ms"),
        *medians("makespan_s", "baseline_s", "schedule_gap"),
        one("schedules found by", ", ".join(f"{k} {n}" for k, n in rows.made_by.most_common())),
        one("steps with an integer program's bound", n_bounded),
        one("compiles after warm-up", int(np.nansum(rows.column("compiles")[WARMUP_STEPS:]))),
        *medians("schedule_s"),
        one("schedule waited for, total", waited_ms, unit="ms"),
        one("loss, first -> last", *losses[[0, -1]].tolist(), between=" -> "),
        *(figure for row in run.evaluations[-1:] for figure in _evaluation_figures(row)),
        *medians("own"),
        one("samples replaced", int(np.nansum(rows.column("n_bad")))),
        one("steps that changed no parameter", rows.n_skipped),
        *(_wall_time_figures(run.wall_time) if run.wall_time else []),
    ]


def _memory_figures(run: RunRecord) -> Iterator[Figure]:
    """Yield the bytes since the last start, of devices that report them."""
    start = run.wall_time.first_step if run.wall_time else 0
    steps = run.rows.column("step")
    columns = {k: run.rows.column(("memory", k))[steps >= start] for k in run.rows.keys("memory")}
    last = {k: v[np.isfinite(v)][-1:].tolist() for k, v in columns.items()}
    if last.get(PEAK_BYTES):
        last.pop(PEAK_UPPER_BOUND, None)
    for key, label in _MEMORY_LABELS.items():
        for n_bytes in last.get(key, ()):
            yield Figure(label, "GiB", (n_bytes / 2**30,))
    if LIVE_BYTES in columns:
        growth = fit_growth(steps[steps >= start], columns[LIVE_BYTES], start)
        values = growth.bytes_per_step / 2**20, growth.standard_error / 2**20
        yield Figure("memory, live, growth per step", "MiB", values, " ± ")


def baseline_lines(run: RunRecord) -> list[str]:
    """Return a line that says how many times longer the run's steps would take without data-aware
    scheduling; no line if no step was simulated so."""
    rows = run.rows
    steps_s = {n: rows.column(("baseline_s", n)) for n in (ARRIVAL_ORDER, LONGEST_FIRST, FSDP)}
    n_compared = int(np.isfinite(steps_s[LONGEST_FIRST]).sum())
    if not n_compared:
        return []
    ratios = {n: percentiles(s / rows.column("makespan_s")).median for n, s in steps_s.items()}
    texts = [f"{number(x)}x over {name}" for name, x in ratios.items() if math.isfinite(x)]
    absent = " or ".join(name for name, x in ratios.items() if math.isnan(x))
    return [
        f"Data-aware scheduling: {', '.join(texts)}, on your {rows.n_steps:,} batches "
        f"({n_compared:,} of them simulated)."
        + f" No plan of {absent} fits into memory and holds these samples."
        * bool(absent)
    ]


def _evaluation_figures(row: EvaluationRow) -> list[Figure]:
    total = {"loss": row.loss, "accuracy": row.accuracy}
    return [
        Figure(f"held-out {metric}{name and f', {name}'}", unit, (math.nan if v is None else v,))
        for name, losses in {"": total, **row.by_source}.items()
        for metric, unit in (("loss", ""), ("accuracy", "%"))
        for v in [losses.get(metric)]
    ]


def _wall_time_figures(spent: WallTime) -> list[Figure]:
    fractions = {f"time of {k}": v for k, v in spent.fractions().items() if k != TRAINING}
    first = {
        "goodput: time of steps that count": spent.goodput,
        "start-up: time before the first step": spent.start_up_fraction,
    }
    fractions = first | fractions
    return [
        Figure("wall time", "s", (spent.wall_s,)),
        Figure("starts", "", (spent.starts,)),
        *(Figure(label, "%", (fraction,)) for label, fraction in fractions.items()),
    ]


def shape_text(module: str, shape: Shape) -> str:
    return f"{module} {shape.rows} x {shape.tokens}"


def bucket_text(bucket: Bucket) -> str:
    return ", ".join(shape_text(m, s) for m, s in bucket.shapes) + " tokens"


def submesh_rows(layout: Layout) -> list[tuple[str, str, str, str]]:
    """Return (name, devices, sizes of the mesh's axes, layers) of each submesh as texts."""
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


def trial_lines(plan: Plan) -> list[str]:
    """Return a line for each plan that the run tried, with its step times and its outcome."""
    lines = []
    for t in plan.trials:
        times = {"predicted": t.predicted_s, "calibrated": t.calibrated_s, "measured": t.measured_s}
        text = ", ".join(f"{name} {number(1e3 * s)} ms" for name, s in times.items() if s)
        lines.append(f"trial of {t.policy}: {text}; {t.outcome}")
    return lines


def plan_lines(run: RunRecord) -> list[str]:
    """Return a line for each submesh, bucket and trial of a run."""
    return [
        *(
            f"submesh {name}: devices {devices} as {' × '.join(AXES)} {shape}, layers {layers}"
            for name, devices, shape, layers in submesh_rows(run.plan.layout)
        ),
        *(f"bucket {bucket_text(b)} per data rank" for b in run.plan.layout.buckets),
        *trial_lines(run.plan),
    ]


def summary_text(run: RunRecord, pictures: list[str]) -> str:
    """Return the text of summary.md; `pictures` are files beside it."""
    lines = [f"# Run {run.name}", "", *baseline_lines(run), "", "| figure | value |", "|---|---:|"]
    lines += [f"| {figure.label} | {figure.text} |" for figure in figures(run)]
    warmup_note = f"Medians leave out the first {WARMUP_STEPS} steps, which warm up."
    lines += ["", warmup_note, "", "## Plan", "", *(f"- {line}" for line in plan_lines(run))]
    lines += ["", "## Pictures", "", *(f"![{name}]({name})\n" for name in pictures)]
    if TIMELINE in pictures:
        lines.append(f"Open `{run_folder.TRACE}` at https://ui.perfetto.dev to look closer.")
    return "\n".join(lines).rstrip() + "\n"


def write_summary(folder: str | Path) -> None:
    """Write timeline.png (when there is a trace), loss.png and summary.md."""
    from dflop_jax.report.timeline import draw

    run = read_run(folder)
    if panels := run.panels:
        draw(panels, {}, run.folder / TIMELINE)
    draw([], {run.name: run.rows.curve()}, run.folder / LOSS)
    text = summary_text(run, [TIMELINE, LOSS] if panels else [LOSS])
    (run.folder / SUMMARY).write_text(text, encoding="utf-8")
