"""The report of `make paper`: a page of tables, a bar chart for each result, timelines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import fill

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
from experiments.paper.cases import MEMORY_SHARE, TUNING_BATCHES, Case
from experiments.paper.costs import get_prices
from experiments.paper.dflop import SHOWN_SYSTEMS
from experiments.paper.evaluation import GROUPINGS, count_replaced, evaluate
from experiments.paper.results import Result
from experiments.paper.setups import CLUSTER, SETUPS, describe_cluster

LINE_WIDTH = 120  # characters, as in docs
ASSUMPTIONS = (
    "A roofline over the models' own kernels, with the default efficiencies below, predicts the "
    "costs of every system; nothing was measured on an A100.",
    "The assumptions below concern DFLOP's results. The results of DIP and OrchMLLM list their own "
    "models, data and devices; their plans have padded static shapes.",
    "Baselines have dynamic shapes without padding: a microbatch costs its tokens, and attention "
    "the squares of its samples. So does DFLOP, except in the columns of this project's plans.",
    "Every system saves a stage's residuals or recomputes them (unnamed ones, each layer or the "
    "whole stage), whichever is fastest. AdamW has float32 states, sharded over data ranks.",
    "PyTorch assigns equal layer counts of encoder and LLM to stages. Megatron-LM has the encoder "
    "on 0 to all but one of the first stages and the LLM evenly on the rest, without interleaved "
    "stages. Both have one tensor and data degree for all modules, and tensor ranks in one node.",
    f"Each system is tuned over its whole space by simulation on {TUNING_BATCHES} batches; "
    f"tables give means over {SETUPS[0].batches} others. Plans use {MEMORY_SHARE:.0%} of memory.",
    "Data ranks of equal degree synchronise only for the reduction of gradients; otherwise every "
    "microbatch waits for its slowest rank. A stage reduces gradients after its last backward.",
    "The planner's data profile and the tuning batches share no draw with the evaluated batches. A "
    "sample that fits no bucket of a plan is replaced by another draw, as in a run.",
    "All parameters train. InternViT-6B has its published 25 heads (the public DFLOP code has 16), "
    "so its tensor degree is 1: 5 divides the heads, but not the connector's 8,192 nor a node of "
    "8. Where a baseline's tensor degree does not divide an encoder, the encoder has the highest "
    "that does and more data ranks, on the same devices. Qwen2.5 keeps its own vocabulary.",
    "LLaVA-OneVision's tower is SigLIP 6B, as in the public code's configuration; the 400M of the "
    "released model and 1B are among the changed inputs.",
)


def draw_bars(result: Result, out: Path) -> None:
    """Draw the bars of a result, with a group for each label."""
    n, series = len(result.labels), list(result.bars.items())
    figure = Figure(figsize=(min(max(7.0, 0.9 * n + 2), 13.0), 4.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(1, len(series))
    for k, (name, values) in enumerate(series):
        positions = np.arange(len(values)) + (k - (len(series) - 1) / 2) * width
        axes.bar(positions, values, width, label=name, color=LINE_COLOURS[k % len(LINE_COLOURS)])
    is_rotated = max((len(x) for x in result.labels), default=0) > 6
    axes.set_xticks(
        range(n),
        result.labels,
        rotation=20 if is_rotated else 0,
        ha="right" if is_rotated else "center",
        fontsize=8,
    )
    axes.set_ylabel(result.unit)
    axes.set_title(result.title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(out, dpi=110)


def format_markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_report(results: Sequence[Result], out: Path, page: Path | None, minutes: float) -> Path:
    """Write paper.md in `out` and return its path. Its part before "# Details" is a section of
    docs/results.md."""
    n_replaced, n_samples = count_replaced()
    parts = [
        "## The papers in simulation: `make paper`",
        fill(
            "Costs come from data sheets, attention as timed on an H100 ([gpus.md](gpus.md)); "
            "`runs/paper/paper.md` has details, assumptions and differences from the papers. No "
            f"planner sees an evaluated batch: of {n_samples:,} samples under plans of static "
            f"shapes {n_replaced:,} fit no bucket and were replaced, as in a run. "
            f"{minutes:.0f} minutes ({time.strftime('%Y-%m-%d')}).",
            LINE_WIDTH,
            break_on_hyphens=False,
        ),
    ]
    for r in (r for r in results if r.on_first_page):
        parts += [
            f"**{r.title}.**",
            format_markdown_table(r.columns, r.rows),
            "\n".join(
                fill(f"- {x}.", LINE_WIDTH, subsequent_indent="  ", break_on_hyphens=False)
                for x in r.summary
            ),
        ]
    parts += [
        "# Details",
        "Results of arXiv 2603.25120, 2504.14145 and 2503.23830 on simulated clusters.",
        f"Timelines of a step: [{page.name}]({page.name})." if page else "",
    ]
    for r in (r for r in results if r.notes or not r.on_first_page):
        parts += [
            f"## {r.title}",
            f"Paper: {r.paper}.",
            "" if r.on_first_page else format_markdown_table(r.columns, r.rows),
            f"![{r.title}]({r.name}.png)" if r.bars else "",
            "\n".join(f"- {line}" for line in r.notes),
            "\n".join(f"Difference from the paper: {line}." for line in r.differences),
        ]
    parts += ["## Assumptions", "\n".join(f"- {line}" for line in ASSUMPTIONS)]
    cluster = [[k, v] for k, v in describe_cluster(CLUSTER).items()]
    parts += [
        "### Cluster",
        format_markdown_table(("", "8 nodes unless a result states others"), cluster),
    ]
    data_rows = [[k, f"{v:g}", data.ASSUMPTION_SOURCES[k]] for k, v in asdict(data.ASSUMED).items()]
    parts += [
        "### Data",
        format_markdown_table(("", "value", "meaning and source"), data_rows),
        format_data_tables(),
    ]
    constants = [[k, f"{v:g}"] for k, v in asdict(Efficiency()).items()]
    parts += ["### Efficiency", format_markdown_table(("constant", "value"), constants)]
    path = out / "paper.md"
    path.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")
    return path


def format_data_tables() -> str:
    """Format the sources of the mixtures and the tokens of their samples."""
    sources = [
        [t["kind"], t["source"], str(t["rows"]), t["licence"]]
        for t in data.load_tables()
        if any(t["kind"] in m for m in data.MIXTURES.values())
    ]
    costs = []
    for mixture, layout in (("vision", "anyres"), ("vision", "dynamic"), ("audio", "anyres")):
        drawn = data.draw_loads(mixture, layout, 4000, 0)
        for quantity, (mean, deviation) in data.summarize_loads(drawn).items():
            costs.append([mixture, layout, quantity, f"{mean:.1f}", f"{deviation:.2f}"])
    return "\n\n".join(
        (
            "Quantile tables of these sources (facts only) are in `experiments/paper/tables.json`; "
            "the vision mixture has 65,000 samples of single images to 60,000 of several and "
            "60,000 clips.",
            format_markdown_table(("kind", "source", "rows", "licence of the source"), sources),
            format_markdown_table(
                ("mixture", "layout", "per sample", "mean", "deviation / mean"), costs
            ),
        )
    )


def write_timelines(case: Case, out: Path) -> Path:
    """Write timelines.html with one step of each system's slowest replica; return its path."""
    folders = []
    for system in SHOWN_SYSTEMS:
        step = evaluate(case, system).steps[0]
        plan, names = step.plan, [s.name for s in step.plan.layout.segments]
        folder = out / plan.policy
        folder.mkdir(exist_ok=True)
        save(plan.with_scheduling(grouping=GROUPINGS[system]), folder / PLAN)
        trace = simulate_step(plan, step.schedule, get_prices(case, plan), names)
        labels = group_labels([step.schedule])
        write_trace(folder / SIMULATED, [_drop_sends(trace)], labels)
        folders.append(folder)
    return write_page(read_runs(folders), out / "timelines.html")


def _drop_sends(trace: Trace) -> Trace:
    """Return the trace without sends, which are short but fill many rows."""
    return replace(trace, events=tuple(e for e in trace.events if " → " not in e.submesh))
