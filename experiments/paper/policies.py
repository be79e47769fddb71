"""All set-ups of the three papers under all policies, and the choice of `auto`.

Command:  python -m experiments.paper --only policies
Minutes:  about 12 on 2 cores, not part of `make paper`
Paper:    no paper compares all three
"""

from __future__ import annotations

from collections.abc import Sequence

from dflop_jax.config import Policy
from experiments.paper import dip_models, orch
from experiments.paper.cases import Case
from experiments.paper.evaluation import MEGATRON, Evaluation, evaluate
from experiments.paper.results import Result
from experiments.paper.setups import SETUPS

SEARCHED: tuple[Policy, ...] = ("dflop", "dip", "orch")
CASES = (*SETUPS, *dip_models.CASES, *orch.CASES)
KEYS = [(case, policy) for case in CASES for policy in (MEGATRON, *SEARCHED, "auto")]


def compare_policies(cases: Sequence[Case] = CASES) -> Result:
    result = Result(
        "policies",
        "Every set-up under every policy: step seconds on held-out batches",
        "each paper compares its system with baselines only",
        f"set-up | devices | Megatron-LM | {' | '.join(SEARCHED)} | auto | chosen | "
        "over Megatron-LM | slower than the best | idle",
        unit="throughput over Megatron-LM",
    )
    for case in cases:
        base = evaluate(case, MEGATRON)
        evaluations = {p: evaluate(case, p) for p in (*SEARCHED, "auto")}
        auto = evaluations["auto"]
        best_s = min(a.step_s for a in evaluations.values())
        cells = [
            f"{case.n_devices} {case.hardware.name}",
            _format_seconds(base),
            *map(_format_seconds, evaluations.values()),
            auto.plan.policy if auto.plan else "-",
            f"{base.step_s / auto.step_s:.2f}x",
            f"{100 * (auto.step_s / best_s - 1):.1f}%",
            f"{auto.idle_share:.0%}",
        ]
        result.add(case.name, cells, **{p: base.step_s / a.step_s for p, a in evaluations.items()})
        result.notes += [
            f"{case.name}, {p}: {a.description}" for p, a in evaluations.items() if not a.fits
        ]
    result.notes += [
        "auto takes the plan with the lowest predicted step time of all policies",
        "Megatron-LM has dynamic shapes; the others pad to four compiled shapes per module",
    ]
    return result


def _format_seconds(evaluation: Evaluation) -> str:
    return f"{evaluation.step_s:.2f}" if evaluation.fits else "-"
