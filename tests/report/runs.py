"""Hand-made records for the report tests: traces, a plan, rows of metrics."""

from __future__ import annotations

from pathlib import Path

from dflop_jax.records import Event, Layout, Plan, Predicted, SegmentPlan, SubmeshPlan, Trace
from dflop_jax.report.metrics import StepMetrics
from dflop_jax.report.reader import read_run
from dflop_jax.report.summary import Figure, figures
from dflop_jax.report.trace import read_trace
from tests.plans import EDGE, bucket


def pipeline_trace(stages, sizes, source) -> Trace:
    """All forward passes, then all backward, over a chain of submeshes: stage -> (forward_s,
    backward_s), times each group's size."""
    events, free, ready = [], dict.fromkeys(stages, 0.0), dict.fromkeys(range(len(sizes)), 0.0)
    for k, way in enumerate(("forward", "backward")):
        for g, size in enumerate(sizes):
            for name in [*stages][:: 1 - 2 * k]:
                start = max(free[name], ready[g])
                free[name] = ready[g] = start + stages[name][k] * size
                events.append(Event(name, name, g, way, start, free[name]))
    for name, (forward_s, _) in stages.items():
        for way in ("reduce", "update"):
            end = free[name] + 0.1 * forward_s
            events.append(Event(name, name, -1, way, free[name], end))
            free[name] = end
    return Trace(5, source, tuple(events))


def make_plan(policy: str = "dflop") -> Plan:
    return Plan(
        policy,
        Layout(
            (SubmeshPlan("enc", 0, 1, 2, 1), SubmeshPlan("llm", 2, 1, 3, 2)),
            (
                SegmentPlan("vision", "vision", 0, 4, "enc", True, True),
                SegmentPlan("llm", "llm", 0, 6, "llm", True, True),
            ),
            (bucket(8, 512), bucket(16, 1024)),
            edges=(EDGE,),
        ),
        predicted=Predicted(0.4, {"enc": 0.7, "llm": 0.9}, {"enc": 1e6, "llm": 2e6}, 0.38),
    )


def make_row(step: int, **changes) -> StepMetrics:
    values = {
        "step": step,
        "loss": 5.0 / (1 + step),
        "supervised_tokens": 100 + step,
        "step_s": 0.5 + 0.01 * step,
        "tokens_per_s": 2000.0,
        "learning_rate": 1e-3,
        "model_flops": 0.75e12,
        "flops_per_s": 1.5e12,
        "flops_per_s_by_module": {"vision": 0.5e12, "llm": 1e12},
        "grad_norm": 1.0,
        "busy_fraction": {"enc": 0.6, "llm": 0.8},
        "padding_fraction": {"vision": 0.1, "llm": 0.05},
        "makespan_s": 0.42,
        "lower_bound_s": 0.4,
        "made_by": "local",
        "schedule_gap": 0.05,
        "integer_bound_s": 0.39,
    }
    return StepMetrics(**(values | changes))


def read_traces(run: Path) -> list[Trace]:
    return [trace for trace, _ in read_trace(run / "trace.json")]


def figures_of(run: str | Path) -> dict[str, Figure]:
    """The figures of a run folder by label."""
    return {figure.label: figure for figure in figures(read_run(run))}


def cells_of(run: str | Path) -> dict[str, str]:
    return {label: figure.text for label, figure in figures_of(run).items()}
