"""DIP's five models under its policy beside a Megatron-LM-like baseline, and what its parts bring.

Command:  python -m experiments.paper --only dip dip-ablation
Paper:    arXiv 2504.14145: VLMs +15.6 to +76.2%, T2V +36.6 to +97.3% over Megatron-LM; VLM-S in
          seconds a step: 26.13, partition 22.27, sub-microbatches 18.81, order 17.61, memory 16.05
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dflop_jax.records import Plan
from dflop_jax.schedule.batch import merge_sub_microbatches
from dflop_jax.simulate.steps import simulate_step
from experiments.paper.answers import MEGATRON, answer, computing_s, mean_s, run_steps
from experiments.paper.cases import Case, Step
from experiments.paper.costs import prices_of
from experiments.paper.dip_models import ASSUMED, CASES
from experiments.paper.results import Result, percent

PAPER = {"VLM": "+16% to +76%", "T2V": "+37% to +97%"}
KEYS = [(case, policy) for case in CASES for policy in (MEGATRON, "dip")]
ABLATION = ("Megatron-LM", "partition", "sub-microbatches", "reordering", "memory")
PAPER_S = (26.13, 22.27, 18.81, 17.61, 16.05)


def run(cases: Sequence[Case] = CASES) -> Result:
    result = Result(
        "dip",
        "DIP: seconds a step of 64 sequences, and throughput over Megatron-LM",
        "VLMs +15.6% to +76.2%, T2V +36.6% to +97.3%; a search takes less than 10 s of a 20 s step",
        (
            "model",
            "devices",
            "Megatron-LM, s",
            "DIP, s",
            "more throughput (paper)",
            "idle, Megatron-LM",
            "idle, DIP",
            "planning, s",
            "schedule of a batch, s",
        ),
        unit="throughput over Megatron-LM",
    )
    for case in cases:
        base, dip = (answer(case, policy) for policy in (MEGATRON, "dip"))
        gain = base.step_s / dip.step_s - 1
        cells = [
            f"{case.n_devices} {case.hardware.name}",
            f"{base.step_s:.2f}",
            f"{dip.step_s:.2f}",
            f"{100 * gain:+.0f}% ({PAPER[case.name[:3]]})",
            percent(base.idle_share),
            percent(dip.idle_share),
            f"{dip.search_s:.0f}",
            f"{dip.schedule_s:.1f}",
        ]
        result.add(case.name, cells, **{"Megatron-LM": 1.0, "DIP": 1 + gain})
        result.notes += [
            f"{case.name}, {name}: {a.words}" for name, a in (("Megatron-LM", base), ("DIP", dip))
        ]
    result.notes += [f"assumed: {line}" for line in ASSUMED]
    return result


def whole_groups(case: Case, plan: Plan) -> Plan:
    """The plan whose modules run every microbatch in one group, of one of as many shapes as there
    were numbers of parts."""
    return merge_sub_microbatches(plan, prices_of(case, plan))[0]


def one_policy(plan: Plan) -> Plan:
    """The plan whose segments have one recompute policy each."""
    segments = tuple(replace(s, remat_less=None) for s in plan.layout.segments)
    return plan.with_layout(segments=segments).with_scheduling(residuals=(), free_bytes={})


def textbook(case: Case, plan: Plan, steps: Sequence[Step]) -> tuple[Step, ...]:
    """The same groups in the order that a plan has without a search."""
    prices, names = prices_of(case, plan), [s.name for s in plan.layout.segments]
    again = []
    for step in steps:
        schedule = replace(step.schedule, order=())
        trace = simulate_step(plan, schedule, prices, names)
        again.append(Step(plan, schedule, trace.makespan_s, computing_s(plan, trace)))
    return tuple(again)


def ablation(cases: Sequence[Case] = CASES) -> Result:
    result = Result(
        "dip-ablation",
        "DIP's parts, one after the other: seconds a step",
        "VLM-S 26.13, 22.27, 18.81, 17.61 and 16.05 s, each part a gain",
        ("model", *ABLATION),
        unit="seconds a step over Megatron-LM's",
    )
    for case in cases:
        base, dip = (answer(case, policy) for policy in (MEGATRON, "dip"))
        assert dip.plan is not None, dip.words
        plain = one_policy(dip.plan)
        whole, steps = whole_groups(case, plain), run_steps(case, plain)
        each = (
            base.step_s,
            mean_s(textbook(case, whole, run_steps(case, whole))),
            mean_s(textbook(case, plain, steps)),
            mean_s(steps),
            dip.step_s,
        )
        cells = [f"{s:.2f} ({base.step_s / s:.2f}x)" for s in each]
        bars = {name: s / base.step_s for name, s in zip(ABLATION, each, strict=True)}
        result.add(case.name, cells, **bars)
    shown = (f"{s:.2f} ({PAPER_S[0] / s:.2f}x)" for s in PAPER_S)
    result.rows.append(["VLM-S in the paper", *shown])
    result.notes = [
        "partition: the placement of DIP's plan, a module's part of a microbatch in one group, "
        "textbook 1F1B; sub-microbatches: the groups of the plan, the same order; reordering: the "
        "order that is searched for every batch; memory: groups that keep more where there is room",
        "sub-microbatches of T2V are the generator's, several of which read one group of the LLM",
        "recompute policies that the planner chooses by module are in every column; where these "
        "recompute nothing, or memory is full, groups have nothing to choose",
    ]
    return result
