"""DIP's five models under its policy, part by part, beside a Megatron-LM-like baseline.

Command:  python -m experiments.paper --only dip
Paper:    arXiv 2504.14145: VLMs +15.6 to +76.2%, T2V +36.6 to +97.3% over Megatron-LM; VLM-S step
          seconds: 26.13, partition 22.27, sub-microbatches 18.81, order 17.61, memory 16.05
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dflop_jax.records import Plan
from dflop_jax.schedule.batch import merge_sub_microbatches
from dflop_jax.simulate.steps import simulate_step
from experiments.paper.cases import Case, Step
from experiments.paper.costs import get_prices
from experiments.paper.dip_models import ASSUMED, CASES
from experiments.paper.evaluation import (
    MEGATRON,
    PUBLISHED,
    Evaluation,
    evaluate,
    map_on_all_cores,
    mean_step_s,
    segment_compute_s,
    simulate_batches,
)
from experiments.paper.results import Result

SYSTEMS = {PUBLISHED: "untuned", MEGATRON: "tuned", "dip": "DIP"}
PAPER_GAINS = {"VLM": "+16 to +76%", "T2V": "+37 to +97%"}
KEYS = [(case, system) for case in CASES for system in SYSTEMS]
PARTS = ("partition", "+ sub-microbatches", "+ order", "+ memory")
PAPER_S = (26.13, 22.27, 18.81, 17.61, 16.05)


def merge_groups(case: Case, plan: Plan) -> Plan:
    """Return the plan without sub-microbatches: a module runs each microbatch in one group."""
    return merge_sub_microbatches(plan, get_prices(case, plan))[0]


def use_uniform_remat(plan: Plan) -> Plan:
    """Return the plan with one recompute policy per segment."""
    segments = tuple(replace(s, remat_less=None) for s in plan.layout.segments)
    return plan.with_layout(segments=segments).with_scheduling(residuals=(), free_bytes={})


def simulate_1f1b(case: Case, plan: Plan, steps: Sequence[Step]) -> tuple[Step, ...]:
    """Simulate the groups of `steps` in 1F1B order, without the searched order."""
    prices, names = get_prices(case, plan), [s.name for s in plan.layout.segments]
    simulated = []
    for step in steps:
        schedule = replace(step.schedule, order=())
        trace = simulate_step(plan, schedule, prices, names)
        compute_s = segment_compute_s(plan, trace)
        simulated.append(Step(step.loads, plan, schedule, trace.makespan_s, compute_s))
    return tuple(simulated)


def add_parts(job: tuple[Case, Evaluation]) -> tuple[str, list[float]]:
    """Return the case's name and its mean step seconds with each of `PARTS` added to the last."""
    case, dip = job
    assert dip.plan is not None, dip.description
    plain_plan = use_uniform_remat(dip.plan)
    whole_plan, steps = merge_groups(case, plain_plan), simulate_batches(case, plain_plan)
    seconds = (
        mean_step_s(simulate_1f1b(case, whole_plan, simulate_batches(case, whole_plan))),
        mean_step_s(simulate_1f1b(case, plain_plan, steps)),
        mean_step_s(steps),
    )
    return case.name, [*seconds, dip.step_s]


def compare_throughput(cases: Sequence[Case] = CASES) -> Result:
    result = Result(
        "dip",
        "DIP: seconds of a step of 64 sequences",
        "VLMs +15.6% to +76.2%, T2V +36.6% to +97.3%; each part brings a gain; a search takes less "
        "than 10 s of a 20 s step",
        ("model", "Megatron-LM, untuned (idle)", "tuned (idle)", *PARTS, "idle", "gain (paper)"),
        unit="step seconds over the tuned Megatron-LM's",
        on_first_page=True,
    )
    parts_s = dict(map_on_all_cores(add_parts, [(case, evaluate(case, "dip")) for case in cases]))
    for case in cases:
        evaluations = {s: evaluate(case, s) for s in SYSTEMS}
        untuned, tuned, dip = evaluations.values()
        gains = ", ".join(
            f"{100 * (a.step_s / dip.step_s - 1):+.0f}%" if a.fits else "-"
            for a in (untuned, tuned)
        )
        cells = [
            *(f"{a.step_s:.2f} ({a.idle_share:.0%})" if a.fits else "-" for a in (untuned, tuned)),
            *(f"{s:.2f}" for s in parts_s[case.name]),
            f"{dip.idle_share:.0%}",
            f"{gains} ({PAPER_GAINS[case.name[:3]]})",
        ]
        bars = {p: s / tuned.step_s for p, s in zip(PARTS, parts_s[case.name], strict=True)}
        result.add(f"{case.name}, {case.n_devices} {case.hardware.name.upper()}", cells, **bars)
        result.notes += [
            f"{case.name}, {SYSTEMS[s]}: {a.description}" for s, a in evaluations.items()
        ]
        result.notes.append(
            f"{case.name}: planned in {dip.search_s:.0f} s, batch scheduled in "
            f"{dip.schedule_s:.1f} s"
        )
    published = [f"{s:.2f}" for s in PAPER_S]
    result.rows.append(["VLM-S in the paper", published[0], "", *published[1:], "", ""])
    result.summary = [
        "partition: DIP's placement with one group per module and microbatch, in 1F1B order; the "
        "next columns add sub-microbatches, the searched order, and residuals that are saved when "
        "memory is free. Untuned: the paper's tensor and pipeline degrees (T2V by analogy), equal "
        "layer counts, the least recomputation that fits",
    ]
    result.notes += [
        "T2V has sub-microbatches of the generator; several read one group of the LLM",
        "all parts use the planner's recompute policies; when these recompute nothing or memory is "
        "full, the memory column changes nothing",
        *(f"assumed: {line}" for line in ASSUMED),
    ]
    return result
