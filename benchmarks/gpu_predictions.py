"""What the planner expects of the bytes of `gpu_compile.py`'s programs, and how far it is off."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from dflop_jax.gpu_compile.child import CompileJob
from dflop_jax.gpu_compile.chip_profile import profile_at
from dflop_jax.gpu_compile.reports import ProgramReport
from dflop_jax.hardware import find_hardware
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import BACKWARD, FORWARD, Plan, Predicted, Shape
from dflop_jax.sim.memory import peak_bytes
from dflop_jax.tasks.graph import in_flight_limit
from dflop_jax.train.prepare import build_model

# Whose programs are compiled for the prediction, the small shape and the large one.
TOLD_TOKENS, TOLD_PIECES = (3072, 12288), (4, 16)
MEDIAN, WORST = 0.05, 0.12


def costs_of(job: CompileJob, degrees: Sequence[int]) -> CostModel:
    """What the planner knows of a case's model on its chip."""
    model, hardware = build_model(job.config.model), find_hardware(job.config.plan.hardware)
    alone = model.piece_tokens
    *encoders, last = model.modules
    shapes = {m: [Shape(n, alone[m]) for n in TOLD_PIECES] if m in alone else
              [Shape(1, n) for n in TOLD_TOKENS] for m in encoders}  # fmt: skip
    shapes[last] = [Shape(1, n) for n in TOLD_TOKENS]
    ticks = partial(print, "compiling for the prediction:", file=sys.stderr, flush=True)
    return CostModel(profile_at(job.config, model, hardware, shapes, degrees, 8, ticks))


def with_peaks(job: CompileJob, costs: CostModel) -> CompileJob:
    """The job whose plan says what the planner expects of its peak memory; as it is where the model
    does not divide over its degrees, which compiling refuses."""
    try:
        peaks = peak_bytes(job.plan.layout, costs, in_flight_limit(job.plan))
    except ValueError:
        return job
    return replace(job, plan=replace(job.plan, predicted=Predicted(peak_bytes=peaks)))


def predicted_bytes(plan: Plan, program: ProgramReport, costs: CostModel) -> float | None:
    """What the planner expects of a program's bytes, and of which of them: see above."""
    if program.kind not in (FORWARD, BACKWARD):
        return None
    segment, mesh = plan.layout.segment(program.segment), plan.layout.submesh(program.submesh).shape
    (shape,) = plan.layout.shapes(segment.module)
    figures = costs.at(segment.module, mesh.model, shape.rows, shape.tokens)
    state = costs.state_of(segment, mesh, trained=True)
    handed, taken = costs.task_bytes(segment, mesh, plan.layout.group_size, figures, state)
    return float(taken if program.kind == BACKWARD else handed) or None


def errors(outcomes: dict[str, dict[str, Any]], kind: str) -> dict[str, float]:
    """Of every prediction ("rows" or "peaks") how far it is off, by name; of equal programs of a
    model and a chip the first."""
    found = {}
    for name, case in outcomes.items():
        for r in case.get(kind, ()):
            if r["predicted_bytes"] and r["actual_bytes"] and not r.get("same_as"):
                what = r["program"] if kind == "rows" else r["submesh"]
                found[f"{name}: {what}"] = r["predicted_bytes"] / r["actual_bytes"] - 1
    return found


def accuracy(outcomes: dict[str, dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Lines about the predictions, and whether they are as good as expected."""
    for kind in ("rows", "peaks"):
        if off := errors(outcomes, kind):
            size = {name: abs(e) for name, e in off.items()}
            worst = max(size, key=size.__getitem__)
            median = statistics.median(size.values())
            words = "programs' bytes" if kind == "rows" else "peak bytes"
            yield (
                f"{words}, {len(off)} of shapes and depths not compiled for the prediction: off "
                f"by {median:.1%} (median), {off[worst]:+.1%} (worst: {worst})",
                median <= MEDIAN and size[worst] <= WORST,
            )
