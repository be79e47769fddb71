"""DIP's five models under its policy beside a Megatron-LM-like baseline, and what its parts bring.

Command:  python -m experiments.paper --only dip dip-work dip-ablation
Paper:    arXiv 2504.14145: VLMs +15.6 to +76.2%, T2V +36.6 to +97.3% over Megatron-LM; VLM-S in
          seconds a step: 26.13, partition 22.27, sub-microbatches 18.81, order 17.61, memory 16.05
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dflop_jax.records import Plan
from dflop_jax.schedule.sub_microbatches import widened
from dflop_jax.sim.pipeline import simulate_step
from experiments.paper.answers import MEGATRON, answer, computing_s, mean_s, run_steps
from experiments.paper.cases import Case, Step, reported
from experiments.paper.costs import DTYPE, prices_of
from experiments.paper.dip_models import (
    ASSUMED,
    CASES,
    FEWER_PICTURES,
    FEWER_SEQUENCES,
    MOST_PICTURES,
    VLM_S,
)
from experiments.paper.results import Result, percent
from experiments.paper.work import mfu, step_flops

PAPER = {"VLM": "+16% to +76%", "T2V": "+37% to +97%"}
KEYS = [(case, policy) for case in CASES for policy in (MEGATRON, "dip")]
SMALLER = {
    "VLM-S, 28 sequences a step": FEWER_SEQUENCES,
    "VLM-S, 0 to 17 pictures": FEWER_PICTURES,
}
WORK_KEYS = [(case, policy) for case in (*CASES, *SMALLER.values()) for policy in (MEGATRON, "dip")]
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


def work(cases: Sequence[Case] = CASES) -> Result:
    result = Result(
        "dip-work",
        "DIP: tokens of a sequence, FLOPs of a step, and the share of the peak that is reached",
        "VLM-S 26.13 s (Megatron-LM) and 16.05 s (DIP); the size of a step is not published",
        (
            "model",
            "sequences a step",
            "pictures or clips a sequence",
            "their tokens",
            "tokens of the LLM",
            "PFLOP a step",
            "s at the devices' peak",
            "Megatron-LM, s (MFU)",
            "DIP, s (MFU)",
        ),
        unit="MFU, %",
    )
    for label, case in {**{c.name: c for c in cases}, **SMALLER}.items():
        samples = [x for batch in reported(case) for x in batch]
        media = next(m for m in case.model().modules if m != "llm")
        tokens = {m: np.mean([x.tokens(m) for x in samples]) for m in (media, "llm")}
        flops = step_flops(case)
        least_s = sum(flops.values()) / case.n_devices / case.hardware.peak_flops(DTYPE)
        base_s, dip_s = (answer(case, policy).step_s for policy in (MEGATRON, "dip"))
        cells = [
            str(case.global_batch),
            f"{np.mean([len(x.lengths(media)) for x in samples]):.1f}",
            *(f"{n:,.0f}" for n in tokens.values()),
            f"{media} {flops[media] / 1e15:.0f}, llm {flops['llm'] / 1e15:.0f}",
            f"{least_s:.1f}",
            *(f"{s:.2f} ({100 * least_s / s:.1f}%)" for s in (base_s, dip_s)),
        ]
        bars = {"Megatron-LM": 100 * least_s / base_s, "DIP": 100 * least_s / dip_s}
        result.add(label, cells, **bars)
    least_s = mfu(VLM_S, 1.0)
    shown = (f"{s:.2f} ({100 * least_s / s:.1f}% of our step)" for s in (PAPER_S[0], PAPER_S[-1]))
    result.rows.append(
        ["VLM-S in the paper", "?", f"at most {MOST_PICTURES}", "?", "8,192", "?", "?", *shown]
    )
    result.notes = [
        "the last two of ours are VLM-S with 0.45 of the FLOPs a step, as many times as few as the "
        "paper's baseline has of our baseline's seconds",
    ]
    result.why = [
        "a step of 64 sequences of 0 to 48 pictures is our choice; at its FLOPs the paper's 16.05 "
        "s would be two thirds of the devices' peak, about what a large product alone reaches, so "
        "its steps hold less work",
    ]
    return result


def whole_groups(case: Case, plan: Plan) -> Plan:
    """The plan whose modules run every microbatch in one group, of one of as many shapes as there
    were numbers of parts."""
    return widened(plan, prices_of(case, plan))[0]


def one_policy(plan: Plan) -> Plan:
    """The plan whose segments have one recompute policy each."""
    segments = tuple(replace(s, remat_less=None) for s in plan.layout.segments)
    return plan.with_layout(segments=segments).with_scheduling(kept=(), free_bytes={})


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
