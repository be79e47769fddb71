"""DFLOP's throughput and hours per epoch (arXiv 2603.25120) on 64 A100: as in the paper, and under
this project's policies.

Command:  python -m experiments.paper --only throughput hours
Paper:    1.2 to 3.6 times the throughput of PyTorch and Megatron-LM; hours per epoch 38 to 14, 24
          to 10 and 60 to 22
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from experiments.paper.cases import Case
from experiments.paper.data import MIXTURES
from experiments.paper.dflop import samples_per_s
from experiments.paper.evaluation import (
    DFLOP,
    MEGATRON,
    PUBLISHED,
    PYTORCH,
    Evaluation,
    evaluate,
    padding_shares,
)
from experiments.paper.results import Result
from experiments.paper.setups import PAPER_EPOCH_HOURS, SETUPS

EPOCH_SAMPLES = sum(MIXTURES["vision"].values())
STATIC_DFLOP, DEFAULT = "dflop", "auto"  # policies of dflop_jax
BASELINES = {
    PUBLISHED: "baseline as published",
    PYTORCH: "PyTorch, tuned",
    MEGATRON: "Megatron-LM, tuned",
}
SYSTEMS = {
    **BASELINES,
    DFLOP: "DFLOP, dynamic shapes",
    STATIC_DFLOP: "DFLOP, static shapes",
    DEFAULT: "this project's default",
}
KEYS = [(case, system) for case in SETUPS for system in SYSTEMS]


def epoch_hours(step_s: float, global_batch: int) -> float:
    """Return the hours of an epoch of the paper's 185 thousand samples."""
    return EPOCH_SAMPLES / global_batch * step_s / 3600


def _format_speedups(baselines: Sequence[Evaluation], evaluation: Evaluation) -> str:
    return ", ".join(f"{a.step_s / evaluation.step_s:.2f}x" if a.fits else "-" for a in baselines)


def compare_throughput(setups: Sequence[Case] = SETUPS) -> Result:
    result = Result(
        "throughput",
        "End-to-end throughput, 64 A100, 256 samples a step",
        "1.2x to 3.6x over PyTorch and Megatron-LM",
        (
            "model",
            *(f"{name}, samples/s" for name in SYSTEMS.values()),
            "padding, static shapes",
            *(f"{SYSTEMS[s]}, over the three baselines" for s in (DFLOP, STATIC_DFLOP)),
        ),
        unit="throughput over the tuned PyTorch",
    )
    gains: dict[str, list[float]] = {s: [] for s in (DFLOP, STATIC_DFLOP)}
    for case in setups:
        evaluations = {s: evaluate(case, s) for s in SYSTEMS}
        baselines = [evaluations[s] for s in BASELINES]
        for s, speedups in gains.items():
            speedups += [a.step_s / evaluations[s].step_s for a in baselines if a.fits]
        cells = [f"{samples_per_s(case, a):.2f}" if a.fits else "-" for a in evaluations.values()]
        padded = padding_shares(case, evaluations[STATIC_DFLOP])
        cells.append(", ".join(f"{m} {share:.0%}" for m, share in padded.items()))
        cells += [_format_speedups(baselines, evaluations[s]) for s in (DFLOP, STATIC_DFLOP)]
        base_s = evaluations[PYTORCH].step_s
        result.add(
            case.name, cells, **{SYSTEMS[s]: base_s / a.step_s for s, a in evaluations.items()}
        )
        result.notes += [
            f"{case.name}, {SYSTEMS[s]}: {a.description}" for s, a in evaluations.items()
        ]
    spans = [
        f"{SYSTEMS[s]}: {min(speedups):.2f}x to {max(speedups):.2f}x of the baselines"
        for s, speedups in gains.items()
    ]
    result.notes = [
        *spans,
        "baseline as published: the public code's training script for 64 GPUs without tuning: four "
        "pipeline stages with equal layer counts, a tensor degree of 8 (less where heads do not "
        "divide by it), every layer recomputed, one sample per microbatch",
        "static shapes: this project's policy dflop with four compiled shapes, to which batches "
        "are padded as in a run; default: the same under policy auto",
        *result.notes,
    ]
    result.differences = [
        "simulation tunes the baselines over their whole space (degrees, microbatches, "
        "recomputation), and their data ranks wait for each other only at the end of a step; the "
        "published baseline shows how much of the paper's gain tuning removes"
    ]
    return result


def compare_epoch_hours(setups: Sequence[Case] = SETUPS) -> Result:
    result = Result(
        "hours",
        "Hours per epoch of 185,000 samples on 64 A100, and baseline over DFLOP",
        "38 to 14 h (2.7x), 24 to 10 (2.4x), 60 to 22 (2.7x)",
        (
            "model",
            "paper: baseline, DFLOP",
            "ratio",
            *(f"{name}, h" for name in BASELINES.values()),
            *(f"{SYSTEMS[s]}, h" for s in (DFLOP, STATIC_DFLOP)),
            *(
                f"{SYSTEMS[s]}: ratio to the published, the best tuned"
                for s in (DFLOP, STATIC_DFLOP)
            ),
        ),
        unit="hours of the baseline over DFLOP's",
    )
    for case in (c for c in setups if c.name in PAPER_EPOCH_HOURS):
        baseline_hours, dflop_hours = PAPER_EPOCH_HOURS[case.name]
        evaluations = {s: evaluate(case, s) for s in (*BASELINES, DFLOP, STATIC_DFLOP)}
        published_s = evaluations[PUBLISHED].step_s
        tuned_s = min(evaluations[s].step_s for s in (PYTORCH, MEGATRON))
        cells = [f"{baseline_hours:.0f}, {dflop_hours:.0f}", f"{baseline_hours / dflop_hours:.1f}x"]
        cells += [
            f"{epoch_hours(a.step_s, case.global_batch):.1f}" if a.fits else "-"
            for a in evaluations.values()
        ]
        bars = {"the paper": baseline_hours / dflop_hours}
        for s in (DFLOP, STATIC_DFLOP):
            speedups = published_s / evaluations[s].step_s, tuned_s / evaluations[s].step_s
            cells.append(", ".join(f"{x:.2f}x" if math.isfinite(x) else "-" for x in speedups))
            bars[f"{SYSTEMS[s]}, to the published"], bars[f"{SYSTEMS[s]}, to the tuned"] = speedups
        result.add(case.name, cells, **bars)
    result.differences = [
        "the paper's hours include input pipelines, stragglers and PyTorch kernels, which these "
        "simulations lack; compare the ratios"
    ]
    return result
