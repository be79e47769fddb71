"""Gain by how the load is shared between encoder and LLM.

Command:  python -m experiments.paper.asymmetry
Minutes:  about 6 alone; about 4 after `throughput` in the same process
Paper:    the gain is larger the closer the loads of encoder and LLM are
"""

from __future__ import annotations

from scipy.stats import spearmanr

from experiments.paper.common import BASELINES, Result, main, outcome, ratio
from experiments.paper.static import load_ratio
from experiments.paper.systems import LLAVA, TOWERS, Setup

SETUPS = tuple(LLAVA[t, d] for d in ("qwen2.5-7b", "qwen2.5-32b", "qwen2.5-72b") for t in TOWERS)


KEYS = [(s, system, 64, 256) for s in SETUPS for system in (*BASELINES, "dflop")]


def run(setups: tuple[Setup, ...] = SETUPS) -> Result:
    result = Result(
        "asymmetry",
        "Gain by encoder load over LLM load (device-seconds of a sample), 64 A100",
        "larger gain with encoder and LLM loads nearly equal",
        ("model", "encoder / LLM", "over PyTorch", "over Megatron-LM"),
        unit="speed-up over Megatron-LM",
    )
    found = []
    for setup in setups:
        d = outcome(setup, "dflop")
        ups = [outcome(setup, b).step_s / d.step_s for b in BASELINES]
        found.append((load_ratio(d), setup.name, *ups))
    for load, name, p, m in sorted(found):
        result.rows.append([name, f"{load:.2f}", f"{p:.2f}x", f"{m:.2f}x"])
        result.labels.append(f"{name} ({load:.2f})")
        result.bars.setdefault("DFLOP", []).append(m)
    if len(found) > 2:
        closeness = [min(f[0], 1 / f[0]) for f in found]
        for column, name in ((2, "PyTorch"), (3, "Megatron-LM")):
            rank = float(spearmanr(closeness, [f[column] for f in found]).statistic)
            result.notes.append(
                f"rank correlation of the gain over {name} with how equal loads are: {rank:+.2f}"
            )
    for llm in dict.fromkeys(s.decoder for s in setups):
        names = [s.name for s in setups if s.decoder == llm]
        mine = sorted(f for f in found if f[1] in names)
        rising = ", ".join(f"{f[0]:.2f}: {ratio(f[3], 1)}" for f in mine)
        result.notes.append(f"{llm}, gain over Megatron-LM by load ratio: {rising}")
    result.why = [
        "within one LLM the encoder's load is all that changes; between LLMs their size also "
        "decides how deep baselines must pipeline, which moves the gain as much"
    ]
    return result


if __name__ == "__main__":
    main(run, KEYS)
