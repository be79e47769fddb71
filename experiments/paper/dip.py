"""DIP's five models under its policy and under a Megatron-LM-like baseline, and an ablation.

Command:  python -m experiments.paper --only dip dip-ablation
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
    evaluate,
    mean_step_s,
    segment_compute_s,
    simulate_batches,
)
from experiments.paper.results import Result

PAPER_GAINS = {"VLM": "+16% to +76%", "T2V": "+37% to +97%"}
KEYS = [(case, policy) for case in CASES for policy in (MEGATRON, "dip")]
ABLATION = ("Megatron-LM", "partition", "sub-microbatches", "reordering", "memory")
PAPER_S = (26.13, 22.27, 18.81, 17.61, 16.05)


def compare_throughput(cases: Sequence[Case] = CASES) -> Result:
    result = Result(
        "dip",
        "DIP: step seconds for 64 sequences, and throughput over Megatron-LM",
        "VLMs +15.6% to +76.2%, T2V +36.6% to +97.3%; a search takes less than 10 s of a 20 s step",
        "model | devices | Megatron-LM, s | DIP, s | more throughput (paper) | idle, "
        "Megatron-LM | idle, DIP | planning, s | schedule of a batch, s",
        unit="throughput over Megatron-LM",
    )
    for case in cases:
        base, dip = (evaluate(case, policy) for policy in (MEGATRON, "dip"))
        gain = base.step_s / dip.step_s - 1
        cells = [
            f"{case.n_devices} {case.hardware.name}",
            f"{base.step_s:.2f}",
            f"{dip.step_s:.2f}",
            f"{100 * gain:+.0f}% ({PAPER_GAINS[case.name[:3]]})",
            f"{base.idle_share:.0%}",
            f"{dip.idle_share:.0%}",
            f"{dip.search_s:.0f}",
            f"{dip.schedule_s:.1f}",
        ]
        result.add(case.name, cells, **{"Megatron-LM": 1.0, "DIP": 1 + gain})
        systems = {"Megatron-LM": base, "DIP": dip}
        result.notes += [f"{case.name}, {s}: {a.description}" for s, a in systems.items()]
    result.notes += [f"assumed: {line}" for line in ASSUMED]
    return result


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
        simulated.append(Step(plan, schedule, trace.makespan_s, segment_compute_s(plan, trace)))
    return tuple(simulated)


def run_ablation(cases: Sequence[Case] = CASES) -> Result:
    result = Result(
        "dip-ablation",
        "DIP's parts, added one after the other: step seconds",
        "VLM-S 26.13, 22.27, 18.81, 17.61 and 16.05 s; each part brings a gain",
        ("model", *ABLATION),
        unit="step seconds over Megatron-LM's",
    )
    for case in cases:
        base, dip = (evaluate(case, policy) for policy in (MEGATRON, "dip"))
        assert dip.plan is not None, dip.description
        plain_plan = use_uniform_remat(dip.plan)
        whole_plan, steps = merge_groups(case, plain_plan), simulate_batches(case, plain_plan)
        step_seconds = (
            base.step_s,
            mean_step_s(simulate_1f1b(case, whole_plan, simulate_batches(case, whole_plan))),
            mean_step_s(simulate_1f1b(case, plain_plan, steps)),
            mean_step_s(steps),
            dip.step_s,
        )
        cells = [f"{s:.2f} ({base.step_s / s:.2f}x)" for s in step_seconds]
        bars = {name: s / base.step_s for name, s in zip(ABLATION, step_seconds, strict=True)}
        result.add(case.name, cells, **bars)
    paper_cells = (f"{s:.2f} ({PAPER_S[0] / s:.2f}x)" for s in PAPER_S)
    result.rows.append(["VLM-S in the paper", *paper_cells])
    result.notes = [
        "partition: DIP's placement with one group per module and microbatch, in 1F1B order; "
        "sub-microbatches: the plan's groups in 1F1B order; reordering: the searched order of each "
        "batch; memory: groups save more residuals when memory is free",
        "T2V has sub-microbatches of the generator; several read one group of the LLM",
        "all columns after the first use the planner's recompute policies; when these recompute "
        "nothing or memory is full, the memory column changes nothing",
    ]
    return result
