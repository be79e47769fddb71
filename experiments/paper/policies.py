"""All set-ups of the three papers under all policies, and which of them `auto` would choose.

Command:  python -m experiments.paper --only policies
Minutes:  about 12 on 2 cores, not part of `make paper`
Paper:    none compares all three
"""

from __future__ import annotations

from collections.abc import Sequence

from dflop_jax.config import Policy
from experiments.paper import dip_models, orch
from experiments.paper.answers import MEGATRON, Answer, answer
from experiments.paper.cases import Case
from experiments.paper.results import Result, percent
from experiments.paper.systems import SETUPS

SEARCHED: tuple[Policy, ...] = ("dflop", "dip", "orch")
CASES = (*SETUPS, *dip_models.CASES, *orch.CASES)
KEYS = [(case, policy) for case in CASES for policy in (MEGATRON, *SEARCHED, "auto")]


def run(cases: Sequence[Case] = CASES) -> Result:
    result = Result(
        "policies",
        "Every set-up under every policy: seconds a step of batches that no search saw",
        "each system is compared with baselines only",
        (
            "set-up",
            "devices",
            "Megatron-LM",
            *SEARCHED,
            "auto",
            "takes",
            "over Megatron-LM",
            "behind the best",
            "idle",
        ),
        unit="throughput over Megatron-LM",
    )
    for case in cases:
        base = answer(case, MEGATRON)
        made = {p: answer(case, p) for p in (*SEARCHED, "auto")}
        taken = made["auto"]
        best_s = min(a.step_s for a in made.values())
        cells = [
            f"{case.n_devices} {case.hardware.name}",
            _seconds(base),
            *map(_seconds, made.values()),
            taken.plan.policy if taken.plan else "-",
            f"{base.step_s / taken.step_s:.2f}x",
            f"{100 * (taken.step_s / best_s - 1):.1f}%",
            percent(taken.idle_share),
        ]
        result.add(case.name, cells, **{p: base.step_s / a.step_s for p, a in made.items()})
        result.notes += [f"{case.name}, {p}: {a.words}" for p, a in made.items() if not a.fits]
    result.notes += [
        "auto: one search over all policies, which takes the plan that it expects to be fastest by "
        "batches of its own",
        "Megatron-LM has true shapes, the others are padded to four compiled ones a module",
    ]
    return result


def _seconds(made: Answer) -> str:
    return f"{made.step_s:.2f}" if made.fits else "-"
