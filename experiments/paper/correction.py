"""Adaptive correction: the scheduler learns that some shapes take longer than predicted.

Command:  python -m experiments.paper --only correction
Paper:    shapes that deviate are penalised; monitoring stays on only while its gain exceeds its
          overhead of about 4% of a step

The plan is DFLOP's with static buckets. A plan with one bucket gets smaller ones, so that samples
have a choice. In simulation every program of one shape takes 1.6 times its prediction. The
correction is the runtime's (dflop_jax/schedule/correction.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from dflop_jax.records import Bucket, Load, Plan, Prices, Schedule, Shape, Trace
from dflop_jax.schedule import schedule_batch
from dflop_jax.schedule.correction import (
    CorrectionState,
    StepSample,
    add_sample,
    correct_prices,
    log_ratios,
    predicted_gain_s,
    task_times,
    with_decision,
)
from dflop_jax.simulate.steps import simulate_step
from experiments.paper.cases import Case
from experiments.paper.costs import get_prices
from experiments.paper.evaluation import TOKEN_MULTIPLE, evaluate, replace_oversize
from experiments.paper.results import Result, print_progress
from experiments.paper.setups import LLAVA

SETUP = LLAVA["siglip-6b", "qwen2.5-7b"]
KEYS = [(SETUP, "dflop")]
STEPS = 24  # of each loop, which cycles through the evaluation batches
SLOWDOWN = 1.6
SAMPLING_OVERHEAD = 0.04  # share of a step, while stage times are sampled
SCHEDULER_WORK = 1000  # units that a schedule may spend on one batch
BUCKET_FRACTIONS = (0.85, 0.7, 0.5)  # sizes of the added buckets


def add_smaller_buckets(plan: Plan) -> Plan:
    """Add smaller buckets to a plan that has only one."""
    if len(plan.layout.buckets) > 1:
        return plan
    (largest,) = plan.layout.buckets
    last = plan.layout.modules[-1]
    smaller = [
        Bucket.from_shapes({m: _scale_shape(s, x, whole_rows=m != last) for m, s in largest.shapes})
        for x in BUCKET_FRACTIONS
    ]
    return plan.with_layout(buckets=(largest, *smaller))


def _scale_shape(shape: Shape, fraction: float, *, whole_rows: bool) -> Shape:
    if whole_rows:
        return Shape(max(1, round(fraction * shape.rows)), shape.tokens)
    return Shape(shape.rows, TOKEN_MULTIPLE * round(fraction * shape.tokens / TOKEN_MULTIPLE))


def slow_down_shape(predicted: Prices, plan: Plan, slow_shape: Shape) -> Prices:
    """Return true prices: the last module's programs of `slow_shape` exceed their prediction."""
    segments = {s.name for s in plan.layout.segments_of(plan.layout.modules[-1])}
    programs = {
        k: p.scaled(SLOWDOWN) if k.shape == slow_shape and k.segment in segments else p
        for k, p in predicted.programs.items()
    }
    return replace(predicted, programs=programs)


@dataclass
class _CorrectionLoop:
    """The correction's state over the steps of a run, and the sampling of stage times."""

    plan: Plan
    predicted: Prices
    names: list[str]
    state: CorrectionState = field(
        default_factory=lambda: CorrectionState("", window=4, next_step=0)
    )
    n_sampled: int = 0

    def observe(self, step: int, batch: Sequence[Load], trace: Trace, schedule: Schedule) -> float:
        """Add a step to the state if it samples stage times; return the overhead in seconds."""
        if not self.state.is_sampling(step):
            return 0.0
        overhead_s = SAMPLING_OVERHEAD * trace.makespan_s
        expected = {k: p.static_s for k, p in self.predicted.programs.items()}
        ratios = log_ratios(task_times(trace, schedule), expected)
        self.state = add_sample(self.state, StepSample(step, step + 1, "", ratios, 0.0, 0.0))
        self.n_sampled += 1
        if self.state.is_full:
            corrected = correct_prices(self.predicted, self.state.correction)
            gain_s = predicted_gain_s(batch, self.plan, self.predicted, corrected, self.names)
            self.state = with_decision(self.state, gain_s, overhead_s)
        return overhead_s


def compare_corrections(case: Case = SETUP, steps: int = STEPS) -> Result:
    """Compare schedules by predicted, by corrected and by true prices."""
    evaluation = evaluate(case, "dflop")
    assert evaluation.plan is not None, evaluation.description
    plan = add_smaller_buckets(evaluation.plan)
    names, predicted = [s.name for s in plan.layout.segments], get_prices(case, plan)
    batches, _ = replace_oversize(case, plan)

    def scheduled(step: int, prices: Prices) -> Schedule:
        batch = batches[step % len(batches)]
        return schedule_batch(batch, plan, prices, names, step=step, work=SCHEDULER_WORK)

    last = plan.layout.modules[-1]
    groups = (g for step in range(len(batches)) for g in scheduled(step, predicted).groups)
    used_shapes = [g.shape for g in groups if g.module == last]
    slow_shape = max(sorted(set(used_shapes)), key=used_shapes.count)
    true_prices = slow_down_shape(predicted, plan, slow_shape)
    loop = _CorrectionLoop(plan, predicted, names)
    step_s: dict[str, list[float]] = {"as predicted": [], "corrected": [], "all known": []}
    for step in range(steps):
        print_progress(f"correction: step {step + 1} of {steps}")
        corrected = correct_prices(predicted, loop.state.correction)
        for name, prices in zip(step_s, (predicted, corrected, true_prices), strict=True):
            schedule = scheduled(step, prices)
            trace = simulate_step(plan, schedule, true_prices, names)
            batch = batches[step % len(batches)]
            overhead_s = loop.observe(step, batch, trace, schedule) if name == "corrected" else 0.0
            step_s[name].append(trace.makespan_s + overhead_s)
    return _build_result(case, plan, slow_shape, step_s, loop.n_sampled)


def _build_result(
    case: Case, plan: Plan, slow_shape: Shape, step_s: Mapping[str, list[float]], n_sampled: int
) -> Result:
    steps = len(step_s["corrected"])
    mean_s = {name: float(np.mean(seconds)) for name, seconds in step_s.items()}
    late_s = {name: float(np.mean(seconds[steps // 2 :])) for name, seconds in step_s.items()}
    result = Result(
        "correction",
        f"{case.name}: step seconds when one LLM shape takes {SLOWDOWN} times its prediction",
        "monitoring stays on while its gain exceeds its overhead of about 4%",
        ("schedules", f"all {steps} steps", "second half", "less than without"),
        unit="step seconds",
        labels=[str(i + 1) for i in range(steps)],
        bars=dict(step_s),
    )
    for name in step_s:
        reduction = 1 - late_s[name] / late_s["as predicted"]
        cells = [f"{mean_s[name]:.2f}", f"{late_s[name]:.2f}", f"{reduction:.0%}"]
        result.rows.append([name, *cells])
    shapes = plan.layout.shapes(plan.layout.modules[-1])
    result.notes = [
        f"{n_sampled} of {steps} steps sampled stage times, with {SAMPLING_OVERHEAD:.0%} overhead",
        f"shape {slow_shape.name} was slowed, one of {', '.join(s.name for s in shapes)}",
    ]
    result.differences = [
        "the paper does not give its rule and its deviating shapes in detail; the gain of a "
        "correction depends on whether the samples fit into other shapes"
    ]
    return result
