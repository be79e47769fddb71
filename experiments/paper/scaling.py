"""Throughput from 1 to 32 nodes of 8 A100.

Command:  python -m experiments.paper.scaling
Minutes:  about 4
Paper:    DFLOP's lead over both baselines grows with the number of nodes
"""

from __future__ import annotations

from experiments.paper.common import BASELINES, Result, main, outcome, ratio
from experiments.paper.systems import LLAVA, Setup

SETUP = LLAVA["siglip-6b", "qwen2.5-7b"]
NODES = (1, 2, 4, 8, 16, 32)
SAMPLES_PER_NODE = 32  # 256 on 8 nodes


KEYS = [
    (SETUP, system, 8 * n, batch)
    for n in NODES
    for batch in (256, SAMPLES_PER_NODE * n)
    for system in (*BASELINES, "dflop")
]


def run(setup: Setup = SETUP, nodes: tuple[int, ...] = NODES) -> Result:
    result = Result(
        "scaling",
        f"{setup.name}: samples/s by nodes of 8 A100",
        "the gap widens with nodes",
        ("nodes", "batch", "PyTorch", "Megatron-LM", "DFLOP", "over PyTorch", "over Megatron-LM"),
        unit="speed-up over Megatron-LM",
    )
    gains: dict[str, list[float]] = {}
    for kind in ("256 samples a step", "32 samples a node"):
        for n in nodes:
            batch = 256 if kind.startswith("256") else SAMPLES_PER_NODE * n
            found = {
                s: outcome(setup, s, n_devices=8 * n, global_batch=batch)
                for s in (*BASELINES, "dflop")
            }
            d = found["dflop"]
            result.rows.append(
                [
                    str(n),
                    str(batch),
                    *(f"{o.samples_per_s:.2f}" for o in found.values()),
                    *(ratio(found[b].step_s, d.step_s) for b in BASELINES),
                ]
            )
            gain = found["megatron"].step_s / d.step_s
            gains.setdefault(kind, []).append(gain)
            result.bars.setdefault(kind, []).append(gain)
    result.labels = [f"{n} node" + "s" * (n > 1) for n in nodes]
    for kind, each in gains.items():
        shown = ", ".join(f"{g:.2f}x" for g in each)
        on = ", ".join(map(str, nodes))
        result.notes.append(f"{kind}: over Megatron-LM {shown} on {on} nodes")
    result.notes.append(
        "the paper does not say whether the batch grows with the nodes: both ways are shown"
    )
    result.why = [
        "with the same batch on more devices there are fewer samples for each, so random "
        "microbatches differ more and pipelines fill worse; with a batch that grows this pressure "
        "is gone, and only more data ranks to wait for are left",
    ]
    return result


if __name__ == "__main__":
    main(run, KEYS)
