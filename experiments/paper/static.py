"""DFLOP's set-ups as this runtime runs them: microbatches padded to a few compiled shapes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflop_jax.contract import MultimodalModel
from dflop_jax.records import Load
from experiments.paper import data, systems
from experiments.paper.cases import Case
from experiments.paper.common import Outcome
from experiments.paper.systems import CLUSTER, Setup


@dataclass(frozen=True)
class _Model:
    setup: Setup

    def __call__(self) -> MultimodalModel:
        return systems.model_of(self.setup)


@dataclass(frozen=True)
class _Loads:
    mixture: str
    layout: str

    def __call__(self, n: int, seed: int) -> list[Load]:
        return data.loads(self.mixture, self.layout, n, 7919 * seed)


def case_of(setup: Setup, n_devices: int = 64, global_batch: int = 256) -> Case:
    """The set-up as the planner is asked about it."""
    drawn = _Loads(setup.mixture, setup.layout)
    return Case(setup.name, _Model(setup), drawn, n_devices, global_batch, CLUSTER)


def load_ratio(found: Outcome) -> float:
    """Device-seconds of the encoder over those of the LLM, for a sample of the tuned system."""
    spent = {"llm": 0.0, "encoder": 0.0}
    p = found.tuned.placement
    for s in p.segments:
        busy = float(np.mean([step.busy_s[s.name] for step in found.steps]))
        spent["llm" if s.module == "llm" else "encoder"] += busy * p.mesh_of(s).n_devices
    return spent["encoder"] / spent["llm"]
