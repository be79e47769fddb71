"""Throughput of the single pipeline stages.

Command:  python -m experiments.paper.stages
Minutes:  about 6 alone; none after `throughput` in the same process
Paper:    a figure: stages of the baselines differ widely, DFLOP's come close to each other
"""

from __future__ import annotations

import numpy as np

from dflop_jax.pipeline.order import resources
from experiments.paper.common import Outcome, Result, main
from experiments.paper.exact import plan_of
from experiments.paper.systems import Setup
from experiments.paper.throughput import KEYS, SETUPS, outcomes


def rates(found: Outcome) -> list[float]:
    """Samples/s that each stage would reach if it never waited, in the order of the pipeline."""
    plan = plan_of(found.costs, found.tuned.placement)
    of = resources(plan)
    busy: dict[int, float] = {}
    for s in plan.segments:
        mean = float(np.mean([step.busy_s[s.name] for step in found.steps]))
        busy[of[s.submesh]] = busy.get(of[s.submesh], 0.0) + mean
    return [found.global_batch / b for b in busy.values()]


def run(setups: tuple[Setup, ...] = SETUPS) -> Result:
    result = Result(
        "stages",
        "Stage throughput, samples/s: slowest to fastest stage (of how many); fastest over slowest",
        "stages of the baselines differ widely, DFLOP's are alike (a figure without numbers here)",
        ("model", "PyTorch", "Megatron-LM", "DFLOP"),
        unit="fastest stage over slowest",
    )
    for setup in setups:
        row = [setup.name]
        for name, found in zip(("PyTorch", "Megatron-LM", "DFLOP"), outcomes(setup).values()):
            each = rates(found)
            spread = max(each) / min(each)
            row.append(f"{min(each):.2f} to {max(each):.2f} ({len(each)}); {spread:.2f}x")
            result.bars.setdefault(name, []).append(spread)
        result.rows.append(row)
        result.labels.append(setup.name)
    result.notes = [
        "one stage (1) has no other to differ from: such a baseline chose data and tensor "
        "parallelism alone"
    ]
    result.why = [
        "DFLOP's encoder and LLM are given whole devices and tensor degrees, so the two do not "
        "meet exactly; stages of the LLM differ by its head and by layers that do not divide"
    ]
    return result


if __name__ == "__main__":
    main(run, KEYS)
