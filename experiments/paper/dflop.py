"""DFLOP's results (arXiv 2603.25120) on A100: throughput, idle time, ablation, nodes.

Command:  python -m experiments.paper --only dflop idle ablation scaling
Paper:    1.2 to 3.6 times the throughput of PyTorch and Megatron-LM; hours per epoch 38 to 14, 24
          to 10 and 60 to 22; 82 to 84% less idle time; a gain from optimizer and scheduler each;
          the gain grows with the nodes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from experiments.paper.cases import Case
from experiments.paper.data import KINDS, MIXTURES
from experiments.paper.evaluation import (
    DFLOP,
    MEGATRON,
    OPTIMIZER_ONLY,
    PUBLISHED,
    PYTORCH,
    SCHEDULER_ONLY,
    Evaluation,
    evaluate,
    padding_shares,
)
from experiments.paper.results import Result
from experiments.paper.setups import (
    INTERNVL_72B,
    LLAVA,
    PAPER_EPOCH_HOURS,
    SETUPS,
    TOWERS,
    MixtureSamples,
)

EPOCH_SAMPLES = sum(MIXTURES["vision"].values())
SHOWN_SYSTEMS = {PYTORCH: "PyTorch", MEGATRON: "Megatron-LM", DFLOP: "DFLOP"}
BASELINES = {PUBLISHED: "untuned", PYTORCH: "PyTorch, tuned", MEGATRON: "Megatron-LM, tuned"}
STATIC_DFLOP = "dflop"  # policy of dflop_jax
SYSTEMS = {
    **BASELINES,
    DFLOP: "DFLOP, dynamic shapes",
    STATIC_DFLOP: "DFLOP, static shapes",
    "auto": "`auto`",
}
ABLATION_CASES = (LLAVA["siglip-6b", "qwen2.5-7b"], LLAVA["siglip-6b", "qwen2.5-32b"], INTERNVL_72B)
ABLATION_SYSTEMS = (PUBLISHED, MEGATRON, OPTIMIZER_ONLY, SCHEDULER_ONLY, DFLOP)
SCALING_CASE = LLAVA["siglip-6b", "qwen2.5-7b"]
NODES = (1, 2, 4, 8)
NODE_DEVICES, SAMPLES_PER_NODE = 8, 32  # 256 samples on 8 nodes
VARIED_BATCHES = (64, 1024)  # samples per step, which the paper does not state


def vary_inputs(llm: str) -> Mapping[str, Case]:
    """Return the set-up of SigLIP-6B and an LLM with another batch, mix of samples, or tower."""
    case = LLAVA["siglip-6b", llm]
    cases = {
        f"{case.name}, {n:,} samples per step": replace(case, global_batch=n, batches=2)
        for n in VARIED_BATCHES
    }
    return {**cases, **vary_mix(case), **{LLAVA[t, llm].name: LLAVA[t, llm] for t in TOWERS[:-1]}}


def vary_mix(case: Case) -> Mapping[str, Case]:
    """Return the set-up with samples of one kind each."""
    assert isinstance(case.draw_loads, MixtureSamples)
    layout = case.draw_loads.layout
    return {
        f"{case.name}, only {kind}": replace(case, draw_loads=MixtureSamples(kind, layout))
        for kind in KINDS
        if kind in MIXTURES["vision"]
    }


POINTS: Mapping[str, Case] = {
    **{case.name: case for case in SETUPS},
    **vary_inputs("llama3-8b"),
    **vary_inputs("qwen2.5-32b"),
    **vary_mix(INTERNVL_72B),
}


def samples_per_s(case: Case, evaluation: Evaluation) -> float:
    """Return samples per second."""
    return case.global_batch / evaluation.step_s


def epoch_hours(step_s: float, global_batch: int) -> float:
    """Return the hours of an epoch of the paper's 185 thousand samples."""
    return EPOCH_SAMPLES / global_batch * step_s / 3600


def compare_throughput(setups: Sequence[Case] = SETUPS) -> Result:
    result = Result(
        "dflop",
        "DFLOP: samples/s on 64 A100, 256 samples per step",
        "1.2x to 3.6x over PyTorch and Megatron-LM; hours of an epoch 38 to 14 (2.7x), 24 to 10 "
        "(2.4x), 60 to 22 (2.7x)",
        (
            "model",
            *SYSTEMS.values(),
            "DFLOP, dynamic shapes, over the three baselines",
            "hours of an epoch: untuned, DFLOP (paper)",
        ),
        unit="throughput over the tuned PyTorch",
        on_first_page=True,
    )
    for case in setups:
        evaluations = {s: evaluate(case, s) for s in SYSTEMS}
        dflop_s, base_s = evaluations[DFLOP].step_s, evaluations[PYTORCH].step_s
        cells = [f"{samples_per_s(case, a):.2f}" if a.fits else "-" for a in evaluations.values()]
        baselines = [evaluations[b] for b in BASELINES]
        cells.append(", ".join(f"{a.step_s / dflop_s:.2f}x" if a.fits else "-" for a in baselines))
        cells.append(_format_hours(case, baselines[0], evaluations[DFLOP]))
        result.add(
            case.name, cells, **{SYSTEMS[s]: base_s / a.step_s for s, a in evaluations.items()}
        )
        result.notes += [
            f"{case.name}, {SYSTEMS[s]}: {a.description}" for s, a in evaluations.items()
        ]
        padded = padding_shares(evaluations[STATIC_DFLOP]).items()
        padding = ", ".join(f"{m} {share:.0%}" for m, share in padded)
        result.notes.append(f"{case.name}, padding with static shapes: {padding}")
    result.summary = [
        "untuned: the public training script for 64 GPUs: four pipeline stages with equal layer "
        "counts (more where memory needs them), for each module the highest tensor degree up to 8 "
        "that divides it (1 for InternViT-6B with its 25 heads), every layer recomputed, one "
        "sample per microbatch",
        "static shapes: policies `dflop` and `auto` with four compiled shapes per module and their "
        "padding. An epoch has 185,000 samples; the hours lack input pipelines, stragglers and "
        "PyTorch's kernels, so compare their ratios",
    ]
    result.differences = [
        "simulation tunes the baselines over their whole space (degrees, microbatches, "
        "recomputation), and their data ranks wait for each other only at the end of a step; the "
        "untuned baseline shows how much of the paper's gain tuning removes"
    ]
    return result


def _format_hours(case: Case, *evaluations: Evaluation) -> str:
    """Format hours of an epoch beside the paper's, or "-" if the paper states none."""
    if case.name not in PAPER_EPOCH_HOURS:
        return "-"
    hours = [f"{epoch_hours(a.step_s, case.global_batch):.1f}" for a in evaluations]
    stated = ", ".join(f"{x:.0f}" for x in PAPER_EPOCH_HOURS[case.name])
    return f"{', '.join(hours)} ({stated})"


def idle_reduction(case: Case, baseline: str) -> float:
    """Return by which share DFLOP's idle device-seconds are below those of a baseline."""
    return 1 - evaluate(case, DFLOP).idle_device_s / evaluate(case, baseline).idle_device_s


def compare_idle(setups: Sequence[Case] = SETUPS) -> Result:
    result = Result(
        "idle",
        "Idle share of device time, and DFLOP's reduction of idle device-seconds",
        "82% to 84% less idle time",
        ("model", *BASELINES.values(), "DFLOP", *(f"less than {b}" for b in BASELINES.values())),
        unit="idle share of the step, %",
    )
    for case in setups:
        evaluations = {s: evaluate(case, s) for s in (*BASELINES, DFLOP)}
        cells = [f"{a.idle_share:.0%}" if a.fits else "-" for a in evaluations.values()]
        cells += [
            f"{idle_reduction(case, b):.0%}" if evaluations[b].fits else "-" for b in BASELINES
        ]
        bars = {SYSTEMS[s]: 100 * a.idle_share for s, a in evaluations.items()}
        result.add(case.name, cells, **bars)
    result.differences = [
        "idle time includes pipeline bubbles and the reduction of gradients, which no schedule "
        "of samples removes; the paper does not define idle time, and a definition without these "
        "would give a larger reduction",
        "a baseline with one stage and a high tensor degree has no bubbles but is slow: its "
        "collectives count as work, so DFLOP can be faster and idle more",
    ]
    return result


def run_ablation(setups: Sequence[Case] = ABLATION_CASES) -> Result:
    result = Result(
        "ablation",
        "DFLOP's parts: step seconds (speed-up over the untuned, over the tuned Megatron-LM)",
        "optimizer and scheduler each contribute, both together most (a figure without numbers)",
        f"model | untuned | Megatron-LM | {OPTIMIZER_ONLY} | {SCHEDULER_ONLY} | both (DFLOP)",
        unit="speed-up over Megatron-LM",
    )
    for case in setups:
        evaluations = {s: evaluate(case, s) for s in ABLATION_SYSTEMS}
        megatron_s = evaluations[MEGATRON].step_s
        published_s = evaluations[PUBLISHED].step_s
        cells = [
            f"{a.step_s:.2f} ({published_s / a.step_s:.2f}x, {megatron_s / a.step_s:.2f}x)"
            for a in evaluations.values()
        ]
        bars = {s: megatron_s / a.step_s for s, a in evaluations.items() if s != MEGATRON}
        result.add(case.name, cells, **bars)
        result.notes += [
            f"{case.name}, {s}: {a.description}" for s, a in evaluations.items() if s != DFLOP
        ]
    result.notes.append(
        "optimizer only: DFLOP's placements, tuned for random microbatches; scheduler only: "
        "Megatron-LM's placements, tuned for balanced microbatches"
    )
    result.notes.append(
        "optimizer only can be slower than a tuned baseline: encoder and LLM have unequal data "
        "ranks, which wait for the slowest rank at every random microbatch; the baseline's ranks "
        "wait only at the end of a step"
    )
    result.differences = [
        "a baseline tuned for balanced microbatches is already close to DFLOP's placement; the "
        "paper's ablation keeps the baseline's own parallelism"
    ]
    return result


def resize_case(case: Case, n: int, batch: int) -> Case:
    return replace(case, n_devices=NODE_DEVICES * n, global_batch=batch)


def compare_nodes(case: Case = SCALING_CASE, nodes: Sequence[int] = NODES) -> Result:
    result = Result(
        "scaling",
        f"{case.name}: samples/s by nodes of {NODE_DEVICES} A100",
        "the gap widens with nodes",
        ("nodes", "batch", "Megatron-LM, tuned", "DFLOP", "over Megatron-LM"),
        unit="speed-up over Megatron-LM",
    )
    for kind in ("256 samples a step", f"{SAMPLES_PER_NODE} samples a node"):
        for n in nodes:
            batch = 256 if kind.startswith("256") else SAMPLES_PER_NODE * n
            resized = resize_case(case, n, batch)
            m, d = (evaluate(resized, s) for s in (MEGATRON, DFLOP))
            cells = [str(batch), *(f"{samples_per_s(resized, a):.2f}" for a in (m, d))]
            result.add(
                str(n), [*cells, f"{m.step_s / d.step_s:.2f}x"], **{kind: m.step_s / d.step_s}
            )
    result.labels = [f"{n} node" + "s" * (n > 1) for n in nodes]
    result.notes = [
        "the paper does not state whether the batch grows with the nodes; both cases are shown"
    ]
    result.differences = [
        "with a constant batch, more devices have fewer samples each, so random microbatches "
        "differ more and pipeline bubbles grow; with a growing batch only the number of data "
        "ranks to wait for grows"
    ]
    return result


KEYS = [(case, system) for case in SETUPS for system in SYSTEMS]
ABLATION_KEYS = [(case, system) for case in ABLATION_CASES for system in ABLATION_SYSTEMS]
SCALING_KEYS = [
    (resize_case(SCALING_CASE, n, batch), system)
    for n in NODES
    for batch in (256, SAMPLES_PER_NODE * n)
    for system in (MEGATRON, DFLOP)
]
