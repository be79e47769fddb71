"""What DFLOP's optimizer and its scheduler bring, alone and together.

Command:  python -m experiments.paper.ablation
Minutes:  about 3 alone; about 1 after `throughput` in the same process
Paper:    both contribute; together they bring more than either (a figure)
"""

from __future__ import annotations

from experiments.paper.common import Result, main, outcome, ratio
from experiments.paper.systems import INTERNVL_72B, LLAVA, Setup

SETUPS = (LLAVA["siglip-6b", "qwen2.5-7b"], LLAVA["siglip-6b", "qwen2.5-32b"], INTERNVL_72B)
SYSTEMS = ("megatron", "optimizer only", "scheduler only", "dflop", "dflop-public")


KEYS = [(s, system, 64, 256) for s in SETUPS for system in SYSTEMS]


def run(setups: tuple[Setup, ...] = SETUPS) -> Result:
    result = Result(
        "ablation",
        "Ablation: seconds a step on 64 A100, and speed-up over Megatron-LM",
        "optimizer and scheduler each contribute, together most (a figure without numbers here)",
        (
            "model",
            "Megatron-LM",
            "optimizer only",
            "scheduler only",
            "both (DFLOP)",
            "public optimizer's rule, with scheduler",
        ),
        unit="speed-up over Megatron-LM",
    )
    for setup in setups:
        found = {s: outcome(setup, s) for s in SYSTEMS}
        base = found["megatron"].step_s
        result.rows.append(
            [setup.name, *(f"{o.step_s:.2f} ({ratio(base, o.step_s)})" for o in found.values())]
        )
        result.labels.append(setup.name)
        for name in SYSTEMS[1:]:
            result.bars.setdefault(name, []).append(base / found[name].step_s)
        result.notes += [
            f"{setup.name}, {s}: {o.tuned.how}" for s, o in found.items() if s != "dflop"
        ]
    result.notes.append(
        "optimizer only: DFLOP's space under random microbatches; scheduler only: Megatron-LM's "
        "space under balanced ones; each is tuned anew for what it is given"
    )
    result.why = [
        "a baseline that is tuned for balanced microbatches by simulation already comes near "
        "DFLOP's placement; the paper's ablation keeps the baseline's own parallelism"
    ]
    return result


if __name__ == "__main__":
    main(run, KEYS)
