"""OrchMLLM's three modalities on up to 2,560 H100: throughput, MFU, overhead, nodes.

Command:  python -m experiments.paper --only orch nodes
Paper:    arXiv 2503.23830: 84B on 2,560 H100 at 41.6% MFU, up to 3.1 times Megatron-LM, overhead
          below 2%
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import jax.numpy as jnp

from dflop_jax.contract import MultimodalModel
from dflop_jax.profile.needed import needed_flops
from dflop_jax.records import Load
from experiments.paper import data
from experiments.paper.answers import MEGATRON, answer
from experiments.paper.cases import Case, reported
from experiments.paper.costs import DTYPE
from experiments.paper.dispatching import exchange, features, home_nodes
from experiments.paper.results import Result, ratio
from models.composed import Composition
from models.sizes import AUDIO, DECODERS, VISION, AudioSize, ModelSize, VisionSize

MIXTURE, LAYOUT = "three modalities", "anyres"
ROW = 8192  # tokens of an LLM row of which needed FLOPs are counted
ASSUMED = (
    "84B: Qwen2.5-72B, a tower of 5.5B (45 layers of 3,200 over 384 px, patches of 14) and an "
    "encoder of Whisper's form with 5.0B (64 layers of 2,560); smaller ones are of our choosing: "
    "39B with Qwen2.5-32B, the same tower and Whisper large, 9B with Qwen2.5-7B, the 1B tower and "
    "Whisper large",
    "samples are the tables' single pictures, several pictures, clips and sounds, as many of each "
    "and each with its text; what a sample has of one modality says nothing about the others",
    "4 samples a device and step; H100 in nodes of 8, 400 Gb/s a device",
)


@dataclass(frozen=True)
class Omni:
    """A tower, perhaps an encoder of sounds, and an LLM."""

    vision: VisionSize
    audio: AudioSize | None
    decoder: str

    def __call__(self) -> MultimodalModel:
        size = ModelSize(DECODERS[self.decoder], self.vision, self.audio, LAYOUT)
        return Composition(size, jnp.dtype(DTYPE), attention_kernel="pallas")


@dataclass(frozen=True)
class Mixed:
    """Samples of all three modalities."""

    def __call__(self, n: int, seed: int) -> list[Load]:
        return data.loads(MIXTURE, LAYOUT, n, seed)


def _case(name: str, model: Omni, n_devices: int) -> Case:
    return Case(name, model, Mixed(), n_devices, 4 * n_devices)


_TOWER_6B = VisionSize(384, 14, 3200, 45, 40, 12800, post_norm=False)
_TOWER_1B = replace(VISION["siglip-1b"], post_norm=False)
WHISPER = AUDIO["whisper-large-v3"]
_WHISPER_5B = replace(WHISPER, width=2560, n_layers=64, n_heads=40, mlp=10240)
CASES = (
    _case("MLLM-9B", Omni(_TOWER_1B, WHISPER, "qwen2.5-7b"), 128),
    _case("MLLM-39B", Omni(_TOWER_6B, WHISPER, "qwen2.5-32b"), 512),
    _case("MLLM-84B", Omni(_TOWER_6B, _WHISPER_5B, "qwen2.5-72b"), 2560),
)
KEYS = [(case, policy) for case in CASES for policy in (MEGATRON, "orch")]


@cache
def step_flops(case: Case) -> float:
    """What the reported batches need on average, padding and recomputation not counted."""
    model = case.model()
    needed = needed_flops(model, {m: model.piece_tokens.get(m, ROW) for m in model.modules})
    return sum(
        sum(map(flops, x.lengths(m), x.content_of(m)))
        for batch in reported(case)
        for x in batch
        for m, flops in needed.items()
    ) / len(reported(case))


def mfu(case: Case, step_s: float) -> float:
    """Share of the devices' peak FLOP/s that the reported batches need on average."""
    return step_flops(case) / step_s / (case.n_devices * case.hardware.peak_flops(DTYPE))


def run(cases: Sequence[Case] = CASES) -> Result:
    result = Result(
        "orch",
        "OrchMLLM: three modalities, 4 samples a device and step",
        "84B on 2,560 H100: 41.6% MFU, up to 3.1x Megatron-LM, overhead below 2%",
        (
            "model",
            "H100",
            "Megatron-LM, s",
            "OrchMLLM, s",
            "over Megatron-LM",
            "MFU, Megatron-LM",
            "MFU, OrchMLLM",
            "exchange, of the step",
            "planning, s",
            "schedule of a batch, s",
        ),
        unit="MFU, %",
    )
    for case in cases:
        base, orch = (answer(case, policy) for policy in (MEGATRON, "orch"))
        shares = [mfu(case, a.step_s) for a in (base, orch)]
        assert orch.plan is not None, orch.words
        moved = exchange(case, orch.plan, orch.steps[0], reported(case)[0], named=True)
        cells = [
            str(case.n_devices),
            f"{base.step_s:.2f}",
            f"{orch.step_s:.2f}",
            ratio(base.step_s, orch.step_s),
            *(f"{100 * x:.1f}%" for x in shares),
            f"{100 * moved.seconds / orch.step_s:.1f}%",
            f"{orch.search_s:.0f}",
            f"{orch.schedule_s:.1f}",
        ]
        bars = {"Megatron-LM": 100 * shares[0], "OrchMLLM": 100 * shares[1]}
        result.add(case.name, cells, **bars)
        result.notes += [
            f"{case.name}, {name}: {a.words}"
            for name, a in (("Megatron-LM", base), ("OrchMLLM", orch))
        ]
    result.notes += [f"assumed: {line}" for line in ASSUMED]
    return result


def nodes(cases: Sequence[Case] = CASES) -> Result:
    result = Result(
        "nodes",
        "OrchMLLM's node-wise placement: features that cross nodes in a step",
        "overhead below 2% (the gain of node-wise placement is a figure without numbers here)",
        (
            "model",
            "GB of features",
            "encoder ranks to LLM ranks",
            "LLM copies are in, nodes",
            "GB across nodes, ranks named at random",
            "node-wise",
            "about the least of any names",
            "exchange of the step, at random",
            "node-wise",
        ),
        unit="GB across nodes a step",
    )
    for case in cases:
        orch = answer(case, "orch")
        assert orch.plan is not None, orch.words
        loads, step = reported(case)[0], orch.steps[0]
        off, on = (exchange(case, orch.plan, step, loads, named) for named in (False, True))
        read = features(case, orch.plan, step, loads)
        of_homes, of_all = home_nodes(case, orch.plan)
        cells = [
            f"{read / 1e9:.1f}",
            " to ".join(str(orch.plan.layout.data_ranks(m)) for m in ("vision", "llm")),
            f"{of_homes} of {of_all}",
            *(f"{e.across / 1e9:.1f}" for e in (off, on)),
            f"{read * (1 - of_homes / of_all) / 1e9:.1f}",
            *(f"{100 * e.seconds / orch.step_s:.2f}%" for e in (off, on)),
        ]
        bars = {"at random": off.across / 1e9, "node-wise": on.across / 1e9}
        result.add(case.name, cells, **bars)
    result.notes.append(
        "who balances what is compared by `benchmarks/dispatch.py`, under every cost of a phase"
    )
    result.notes.append(
        "encoders work on all nodes alike, an LLM rank reads through one node: features of nodes "
        "through which no LLM rank reads cross whatever the names"
    )
    return result
