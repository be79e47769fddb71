"""The report of `make paper`: one page of tables, a picture for each result, timelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from dflop_jax.profile.kernels import Efficiency
from dflop_jax.records import Trace
from dflop_jax.records.files import save
from dflop_jax.report.html import write_page
from dflop_jax.report.panels import LINE_COLOURS
from dflop_jax.report.reader import read_runs
from dflop_jax.report.run_folder import PLAN, SIMULATED
from dflop_jax.report.trace import group_labels, write_trace
from dflop_jax.simulate.steps import simulate_step
from experiments.paper import data
from experiments.paper.answers import TRUE_SHAPES, answer
from experiments.paper.cases import MEMORY_SHARE, TUNING, Case
from experiments.paper.costs import prices_of
from experiments.paper.dflop import SHOWN
from experiments.paper.results import Result
from experiments.paper.systems import CLUSTER, SETUPS, described

ASSUMED = (
    "Costs are predicted: a roofline over the models' own kernels with the default efficiencies "
    "below, the same for every system; nothing was measured on an A100.",
    "What follows is of DFLOP's results; those of DIP and OrchMLLM name their own models, data and "
    "devices, and their plans have static shapes, padded.",
    "Baselines have dynamic shapes: a microbatch costs its true tokens, attention the squares of "
    "its samples, and no padding. So has DFLOP, except in the column of this project's default.",
    "Every system keeps what a stage's forward computed for its backward, or recomputes (what "
    "is not named, each layer or the whole stage) where that is best. Optimizer "
    "state is AdamW in float32, sharded over data ranks.",
    "PyTorch: layers of encoder and LLM dealt to stages by count. Megatron-LM: the encoder on 0 to "
    "all but one of the first stages, the LLM evenly on the rest; no interleaved stages. Both: one "
    "tensor and data degree for the whole model, tensor parallelism inside a node.",
    f"Each system is tuned over its whole space by simulation on {TUNING} global batches and "
    f"reported as the mean over {SETUPS[0].batches} others; {100 * MEMORY_SHARE:.0f}% of memory is "
    "used. DFLOP's placement is tuned like theirs, over all of its own.",
    "Data ranks of equal degree are independent until the gradients are added up; else every "
    "microbatch waits for its slowest rank. A stage adds up its gradients after "
    "its last backward.",
    "All parameters train. InternViT-6B has 16 heads, as in the public DFLOP code (the published "
    "25 split over no node), and Qwen2.5's vocabulary is not enlarged for it.",
    "LLaVA-OneVision's tower is SigLIP 6B, as in the public code's configuration; the 400M of the "
    "released model and 1B stand in the asymmetry table.",
)


def draw(result: Result, out: Path) -> None:
    """Bars of a result, a group for each label."""
    n, series = len(result.labels), list(result.bars.items())
    figure = Figure(figsize=(min(max(7.0, 0.9 * n + 2), 13.0), 4.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(series))
    for k, (name, values) in enumerate(series):
        at = np.arange(len(values)) + (k - (len(series) - 1) / 2) * width
        axes.bar(at, values, width, label=name, color=LINE_COLOURS[k % len(LINE_COLOURS)])
    turned = max((len(x) for x in result.labels), default=0) > 6
    axes.set_xticks(
        range(n),
        result.labels,
        rotation=20 if turned else 0,
        ha="right" if turned else "center",
        fontsize=8,
    )
    axes.set_ylabel(result.unit)
    axes.set_title(result.title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(out, dpi=110)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_report(results: Sequence[Result], out: Path, page: Path | None, minutes: float) -> Path:
    """paper.md in `out`."""
    parts = [
        "# The evaluations of DFLOP, DIP and OrchMLLM in simulation",
        "The results of arXiv 2603.25120, 2504.14145 and 2503.23830 on simulated clusters, made in "
        f"{minutes:.1f} minutes by `make paper`.",
        f"Timelines of a step: [{page.name}]({page.name})." if page else "",
    ]
    for r in results:
        parts += [
            f"## {r.title}",
            f"Paper: {r.paper}.",
            markdown_table(r.columns, r.rows),
            f"![{r.title}]({r.name}.png)" if r.bars else "",
            "\n".join(f"- {line}" for line in r.notes),
            "\n".join(f"Where it differs: {line}." for line in r.why),
        ]
    parts += ["## Assumptions", "\n".join(f"- {line}" for line in ASSUMED)]
    cluster = [[k, v] for k, v in described(CLUSTER).items()]
    parts += ["### Cluster", markdown_table(("", "8 nodes unless said otherwise"), cluster)]
    how = [[k, f"{v:g}", data.WHY[k]] for k, v in asdict(data.Assumptions()).items()]
    parts += ["### Data", markdown_table(("", "value", "meaning and source"), how), data_table()]
    constants = [[k, f"{v:g}"] for k, v in asdict(Efficiency()).items()]
    parts += ["### Efficiency", markdown_table(("constant", "value"), constants)]
    path = out / "paper.md"
    path.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
    return path


def data_table() -> str:
    """Sources of the mixtures, and what their samples cost."""
    sources = [
        [t["kind"], t["source"], str(t["rows"]), t["licence"]]
        for t in data.tables()
        if any(t["kind"] in m for m in data.MIXTURES.values())
    ]
    costs = []
    for mixture, layout in (("vision", "anyres"), ("vision", "dynamic"), ("audio", "anyres")):
        drawn = data.loads(mixture, layout, 4000, 0)
        for what, (mean, deviation) in data.facts(drawn).items():
            costs.append([mixture, layout, what, f"{mean:.1f}", f"{deviation:.2f}"])
    return "\n\n".join(
        (
            "Quantile tables of these sources (facts only) are in `experiments/paper/tables.json`; "
            "the vision mixture takes 65,000 samples of single images to 60,000 of several and "
            "60,000 clips.",
            markdown_table(("kind", "source", "rows", "licence of the source"), sources),
            markdown_table(("mixture", "layout", "per sample", "mean", "deviation / mean"), costs),
        )
    )


def write_timelines(case: Case, out: Path) -> Path:
    """timelines.html: one step of each system, of its slowest replica."""
    folders = []
    for system in SHOWN:
        step = answer(case, system).steps[0]
        plan, names = step.plan, [s.name for s in step.plan.layout.segments]
        folder = out / plan.policy
        folder.mkdir(exist_ok=True)
        save(plan.with_scheduling(grouping=TRUE_SHAPES[system]), folder / PLAN)
        trace = simulate_step(plan, step.schedule, prices_of(case, plan), names)
        labels = group_labels([step.schedule])
        write_trace(folder / SIMULATED, [_without_links(trace)], labels)
        folders.append(folder)
    return write_page(read_runs(folders), out / "timelines.html")


def _without_links(trace: Trace) -> Trace:
    """The trace without sends: sixteen stages have thirty links, and all of them are short."""
    return replace(trace, events=tuple(e for e in trace.events if " → " not in e.submesh))
