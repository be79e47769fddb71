"""Idle time of the devices in a step.

Command:  python -m experiments.paper.idle
Minutes:  about 6 alone; none after `throughput` in the same process
Paper:    DFLOP cuts the devices' idle time by 82 to 84%
"""

from __future__ import annotations

from experiments.paper.common import Result, main, percent
from experiments.paper.systems import Setup
from experiments.paper.throughput import KEYS, SETUPS, outcomes


def run(setups: tuple[Setup, ...] = SETUPS) -> Result:
    result = Result(
        "idle",
        "Idle share of all devices' time, and idle device-seconds less than the baseline's",
        "82% to 84% less idle time",
        ("model", "PyTorch", "Megatron-LM", "DFLOP", "less than PyTorch", "less than Megatron-LM"),
        unit="idle share of the step, %",
    )
    cuts = []
    for setup in setups:
        found = outcomes(setup)
        p, m, d = (found[s] for s in ("pytorch", "megatron", "dflop"))
        less = [1 - d.idle_device_s / o.idle_device_s for o in (p, m)]
        cuts += less
        result.rows.append(
            [setup.name, *(percent(o.idle_share) for o in (p, m, d)), *map(percent, less)]
        )
        result.labels.append(setup.name)
        for name, o in (("PyTorch", p), ("Megatron-LM", m), ("DFLOP", d)):
            result.bars.setdefault(name, []).append(100 * o.idle_share)
    result.notes = [f"idle time here {percent(min(cuts))} to {percent(max(cuts))} less"]
    result.why = [
        "idle is what a device does not compute of a whole step: bubbles of filling and draining "
        "the pipeline and the reduction of gradients count, and no schedule of samples removes "
        "them. How the paper counts is not known; less counted as unavoidable would cut more",
        "a baseline of one stage without bubbles (high tensor parallelism for the whole model) is "
        "seldom idle but slow: its collectives count as work, so DFLOP can be faster and idle more",
    ]
    return result


if __name__ == "__main__":
    main(run, KEYS)
