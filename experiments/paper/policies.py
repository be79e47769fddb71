"""All set-ups of the three papers under all policies, and which of them `auto` would choose.

Command:  python -m experiments.paper.policies
Minutes:  about 12 on 2 cores, not part of `make paper`
Paper:    none compares all three
"""

from __future__ import annotations

from collections.abc import Sequence

from dflop_jax.config import Policy
from experiments.paper import dip_models, orch
from experiments.paper.cases import BASELINE, Answer, Case, answer, prepare
from experiments.paper.common import Result, percent, print_result
from experiments.paper.static import case_of
from experiments.paper.throughput import SETUPS

SEARCHED: tuple[Policy, ...] = ("dflop", "dip", "orch")
CASES = (*map(case_of, SETUPS), *dip_models.CASES, *orch.CASES)
KEYS = [(case, policy) for case in CASES for policy in (BASELINE, *SEARCHED, "auto")]


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
        labels=[case.name for case in cases],
    )
    for case in cases:
        base = answer(case, BASELINE)
        found = {p: answer(case, p) for p in (*SEARCHED, "auto")}
        taken = found["auto"]
        best_s = min(a.step_s for a in found.values())
        result.rows.append(
            [
                case.name,
                f"{case.n_devices} {case.hardware.name}",
                _seconds(base),
                *map(_seconds, found.values()),
                taken.plan.policy if taken.plan else "-",
                f"{base.step_s / taken.step_s:.2f}x",
                f"{100 * (taken.step_s / best_s - 1):.1f}%",
                percent(taken.idle_share),
            ]
        )
        for p, a in found.items():
            result.bars.setdefault(p, []).append(base.step_s / a.step_s)
            if not a.fits:
                result.notes.append(f"{case.name}, {p}: {a.words}")
    result.notes += [
        "auto: one search over all policies, which takes the plan that it expects to be fastest by "
        "batches of its own",
        "Megatron-LM has true shapes, the others are padded to four compiled ones a module",
    ]
    return result


def _seconds(found: Answer) -> str:
    return f"{found.step_s:.2f}" if found.fits else "-"


if __name__ == "__main__":
    prepare(KEYS)
    print_result(run())
