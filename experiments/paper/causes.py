"""Headlines that are below the papers', each with the input that was changed to test its cause.

Command:  python -m experiments.paper --only causes
Paper:    DFLOP, DIP and OrchMLLM, as in their tables
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments.paper.answers import (
    BASELINES,
    DFLOP,
    IN_STAGES,
    MEGATRON,
    PUBLISHED,
    Answer,
    answer,
)
from experiments.paper.cases import Case, reported
from experiments.paper.dip import PAPER_S
from experiments.paper.dip_models import FEWER_PICTURES, FEWER_SEQUENCES, VLM_S
from experiments.paper.dispatching import exchange
from experiments.paper.orch import CASES, LARGE
from experiments.paper.results import Result, percent
from experiments.paper.systems import HOURS, SETUPS
from experiments.paper.work import mfu

# H100 whose memory lets the 84B model be cut less deeply: that of an H200.
ROOMY = replace(LARGE, hardware=replace(LARGE.hardware, memory_bytes=141e9))
KEYS = [
    *((case, system) for case in SETUPS for system in (*BASELINES, PUBLISHED, DFLOP)),
    *((c, s) for c in (VLM_S, FEWER_SEQUENCES, FEWER_PICTURES) for s in (MEGATRON, "dip")),
    *((case, IN_STAGES) for case in (VLM_S, FEWER_SEQUENCES)),
    *((case, system) for case in CASES for system in (MEGATRON, PUBLISHED, "orch")),
    (ROOMY, "orch"),
]


def run() -> Result:
    result = Result(
        "causes",
        "Headlines below the papers', and what they become when the suspected cause is changed",
        "as in the rows",
        ("headline", "paper", "here", "changed", "then"),
    )
    for row in (*_dflop(SETUPS), *_dip(), *_orch()):
        result.rows.append(row)
    result.notes = [
        "as published: the untuned baseline of the throughput table; tuned: the faster of PyTorch "
        "and Megatron-LM, each tuned over its whole space",
        "84B with 141 GB: the same chip and links with the memory of an H200",
    ]
    return result


def _dflop(setups: Sequence[Case]) -> list[list[str]]:
    to_published = "the baseline: as published, not tuned"
    tuned, published = [], []
    rows = []
    for case in setups:
        ours_s = answer(case, DFLOP).step_s
        tuned.append(min(answer(case, b).step_s for b in BASELINES) / ours_s)
        published.append(answer(case, PUBLISHED).step_s / ours_s)
        if case.name in HOURS:
            before, after = HOURS[case.name]
            both = (f"{x[-1]:.2f}x" for x in (tuned, published))
            here, then = both
            what = f"hours, {case.name}"
            rows.append([what, f"{before / after:.1f}x", here, to_published, then])
    spans = (f"{min(x):.2f}x to {max(x):.2f}x" for x in (tuned, published))
    here, then = spans
    rows.insert(0, ["DFLOP over its baselines", "1.2x to 3.6x", here, to_published, then])
    here, then = (_less_idle(setups, systems) for systems in (BASELINES, (PUBLISHED,)))
    return [*rows, ["idle time less", "82% to 84%", here, to_published, then]]


def _less_idle(setups: Sequence[Case], systems: Sequence[str]) -> str:
    less = [
        1 - answer(case, DFLOP).idle_device_s / answer(case, s).idle_device_s
        for case in setups
        for s in systems
        if answer(case, s).fits
    ]
    return f"{percent(min(less))} to {percent(max(less))}"


def _dip() -> list[list[str]]:
    staged = "a baseline of two pipeline stages or more"
    fewer = "28 sequences a step, not 64"
    here, *changed = (
        [answer(case, s).step_s for s in (baseline, "dip")]
        for case, baseline in (
            (VLM_S, MEGATRON), (FEWER_SEQUENCES, MEGATRON), (FEWER_PICTURES, MEGATRON),
            (VLM_S, IN_STAGES), (FEWER_SEQUENCES, IN_STAGES),
        )
    )  # fmt: skip
    pictures = "0 to 17 pictures a sequence, not 0 to 48"
    what = (fewer, pictures, staged, f"{staged}, {fewer}")
    rows = []
    for name, then in zip(what, changed, strict=True):
        rows += [
            [
                "VLM-S, seconds",
                f"{PAPER_S[0]}, {PAPER_S[-1]}",
                "{:.2f}, {:.2f}".format(*here),
                name,
                "{:.2f}, {:.2f}".format(*then),
            ],
            [
                "VLM-S, DIP over Megatron-LM",
                f"{PAPER_S[0] / PAPER_S[-1]:.2f}x",
                f"{here[0] / here[1]:.2f}x",
                name,
                f"{then[0] / then[1]:.2f}x",
            ],
        ]
    return rows


def _orch() -> list[list[str]]:
    rows = []
    for case in CASES:
        ours_s = answer(case, "orch").step_s
        here, then = (answer(case, s).step_s / ours_s for s in (MEGATRON, PUBLISHED))
        what = "the baseline: four stages, tensor parallelism of 8, not tuned"
        rows.append(
            [f"{case.name} over Megatron-LM", "up to 3.1x", f"{here:.2f}x", what, f"{then:.2f}x"]
        )
    here, roomy = answer(LARGE, "orch"), answer(ROOMY, "orch")
    memory = "memory of a device: 141 GB, not 80"
    rows.append(
        [
            "84B, MFU",
            "41.6%",
            f"{100 * mfu(LARGE, here.step_s):.1f}%",
            memory,
            f"{100 * mfu(ROOMY, roomy.step_s):.1f}%",
        ]
    )
    shares = (_across(case, made) for case, made in ((LARGE, here), (ROOMY, roomy)))
    return [*rows, ["84B, GB across nodes", "-", next(shares), memory, next(shares)]]


def _across(case: Case, made: Answer) -> str:
    assert made.plan is not None, made.words
    each = [
        exchange(case, made.plan, made.steps[0], reported(case)[0], named).across / 1e9
        for named in (False, True)
    ]
    return "{:.0f} at random, {:.0f} node-wise".format(*each)
