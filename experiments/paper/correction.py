"""Adaptive correction: some shapes take longer than predicted, and the schedule learns it.

Command:  python -m experiments.paper --only correction
Paper:    shapes that deviate are penalised; monitoring stays on only while its gain exceeds its
          overhead of about 4% of a step

The plan is DFLOP's with static buckets; to one bucket smaller ones are added, so that samples have
a choice. On the pretended hardware every program of one shape takes 1.6 times its prediction. The
rule is the one this runtime has (dflop_jax/schedule/correction.py).
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
from experiments.paper.answers import TOKEN_MULTIPLE, answer
from experiments.paper.cases import Case
from experiments.paper.costs import prices_of
from experiments.paper.results import Result, percent, say
from experiments.paper.systems import LLAVA

SETUP = LLAVA["siglip-6b", "qwen2.5-7b"]
KEYS = [(SETUP, "dflop")]
STEPS, BATCHES = 24, 4  # steps of each loop, over so many batches in turn
SLOW = 1.6
_FIRST_SEED = 6  # of the batches, which are none of those that are reported
OVERHEAD = 0.04  # of a step, while stage times are sampled
WORK = 1000
PARTS = (0.85, 0.7, 0.5)  # of a plan's only bucket


def several_buckets(plan: Plan) -> Plan:
    """The plan, with smaller buckets beside its only one."""
    if len(plan.layout.buckets) > 1:
        return plan
    (largest,) = plan.layout.buckets
    last = plan.layout.modules[-1]
    smaller = [
        Bucket.from_shapes({m: _scaled(s, part, whole_rows=m != last) for m, s in largest.shapes})
        for part in PARTS
    ]
    return plan.with_layout(buckets=(largest, *smaller))


def _scaled(shape: Shape, part: float, *, whole_rows: bool) -> Shape:
    if whole_rows:
        return Shape(max(1, round(part * shape.rows)), shape.tokens)
    return Shape(shape.rows, TOKEN_MULTIPLE * round(part * shape.tokens / TOKEN_MULTIPLE))


def hardware(predicted: Prices, plan: Plan, slow: Shape) -> Prices:
    """True prices when the last module's programs of shape `slow` take longer than predicted."""
    late = {s.name for s in plan.layout.segments_of(plan.layout.modules[-1])}
    programs = {
        k: p.scaled(SLOW) if k.shape == slow and k.segment in late else p
        for k, p in predicted.programs.items()
    }
    return replace(predicted, programs=programs)


@dataclass
class _Loop:
    """The corrected loop: what is learnt of measured stage times, and when these are sampled."""

    plan: Plan
    predicted: Prices
    names: list[str]
    learnt: CorrectionState = field(
        default_factory=lambda: CorrectionState("", window=4, next_step=0)
    )
    n_sampled: int = 0

    def observe(self, step: int, batch: Sequence[Load], trace: Trace, schedule: Schedule) -> float:
        """Learn of a step, if its stage times are sampled; seconds that this took."""
        if not self.learnt.is_sampling(step):
            return 0.0
        overhead_s = OVERHEAD * trace.makespan_s
        expected = {k: p.static_s for k, p in self.predicted.programs.items()}
        ratios = log_ratios(task_times(trace, schedule), expected)
        self.learnt = add_sample(self.learnt, StepSample(step, step + 1, "", ratios, 0.0, 0.0))
        self.n_sampled += 1
        if self.learnt.is_full:
            corrected = correct_prices(self.predicted, self.learnt.correction)
            gain_s = predicted_gain_s(batch, self.plan, self.predicted, corrected, self.names)
            self.learnt = with_decision(self.learnt, gain_s, overhead_s)
        return overhead_s


def run(case: Case = SETUP, steps: int = STEPS) -> Result:
    """Steps scheduled by predicted prices, by corrected ones, and by the true ones."""
    chosen = answer(case, "dflop")
    assert chosen.plan is not None, chosen.words
    plan = several_buckets(chosen.plan)
    names, predicted = [s.name for s in plan.layout.segments], prices_of(case, plan)
    batches = [case.loads(case.global_batch, _FIRST_SEED + i) for i in range(BATCHES)]

    def scheduled(step: int, prices: Prices) -> Schedule:
        batch = batches[step % len(batches)]
        return schedule_batch(batch, plan, prices, names, step=step, work=WORK)

    last = plan.layout.modules[-1]
    groups = (g for step in range(BATCHES) for g in scheduled(step, predicted).groups)
    used = [g.shape for g in groups if g.module == last]
    slow = max(sorted(set(used)), key=used.count)
    true, loop = hardware(predicted, plan, slow), _Loop(plan, predicted, names)
    spent: dict[str, list[float]] = {"as predicted": [], "corrected": [], "all known": []}
    for step in range(steps):
        say(f"correction: step {step + 1} of {steps}")
        for name, prices in zip(
            spent, (predicted, correct_prices(predicted, loop.learnt.correction), true), strict=True
        ):
            schedule = scheduled(step, prices)
            trace = simulate_step(plan, schedule, true, names)
            batch = batches[step % len(batches)]
            more_s = loop.observe(step, batch, trace, schedule) if name == "corrected" else 0.0
            spent[name].append(trace.makespan_s + more_s)
    return _result(case, plan, slow, spent, loop.n_sampled)


def _result(
    case: Case, plan: Plan, slow: Shape, spent: Mapping[str, list[float]], n_sampled: int
) -> Result:
    steps = len(spent["corrected"])
    mean = {name: float(np.mean(each)) for name, each in spent.items()}
    late = {name: float(np.mean(each[steps // 2 :])) for name, each in spent.items()}
    result = Result(
        "correction",
        f"{case.name}: seconds a step when one shape of the LLM takes {SLOW} times its prediction",
        "monitoring pays for itself: on while its gain exceeds an overhead of about 4%",
        ("schedules", f"all {steps} steps", "second half", "less than without"),
        unit="seconds a step",
        labels=[str(i + 1) for i in range(steps)],
        bars=dict(spent),
    )
    for name in spent:
        less = 1 - late[name] / late["as predicted"]
        result.rows.append([name, f"{mean[name]:.2f}", f"{late[name]:.2f}", percent(less)])
    shapes = plan.layout.shapes(plan.layout.modules[-1])
    result.notes = [
        f"stage times were sampled in {n_sampled} of {steps} steps, at {percent(OVERHEAD)} of one",
        f"shape {slow.name} was slowed, one of {', '.join(s.name for s in shapes)}",
    ]
    result.why = [
        "the paper's rule and its deviating shapes are not known in detail; what a correction can "
        "bring depends on whether the samples fit into other shapes"
    ]
    return result
