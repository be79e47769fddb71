"""DFLOP's plan as this runtime runs it: microbatches padded to a few compiled shapes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import numpy as np

from dflop_jax.config import PlanConfig
from dflop_jax.plan.predict import simulate
from dflop_jax.plan.search import search_plan
from dflop_jax.records import Plan, Trace
from experiments.paper import data
from experiments.paper.common import (
    MAX_MODEL,
    MAX_STAGE,
    MEMORY_SHARE,
    REPORTED,
    TUNING,
    Outcome,
    say,
    seen_batches,
)
from experiments.paper.systems import CLUSTER, Setup, profile_of

TOKEN_MULTIPLE = 128
CONFIG = PlanConfig(
    policy="dflop",
    effort="quick",
    buckets=4,
    max_model=MAX_MODEL,
    max_stage=MAX_STAGE,
    max_microbatches=128,
    sampled_batches=TUNING,
)


@dataclass(frozen=True)
class Planned:
    """What the planner chose, and how long that took."""

    plan: Plan
    search_s: float
    n_candidates: int


@cache
def planned(setup: Setup, n_devices: int = 64, global_batch: int = 256) -> Planned:
    """The planner's choice of policy dflop: placement, buckets, remat."""
    say(f"{setup.name}: plan with static buckets for {n_devices} devices")
    profile, seen = profile_of(setup), data.profile(setup.mixture, setup.layout)
    start_s = time.perf_counter()
    found = search_plan(
        profile,
        seen,
        n_devices=n_devices,
        global_batch=global_batch,
        config=CONFIG,
        memory_bytes=MEMORY_SHARE * CLUSTER.memory_bytes,
        hardware=CLUSTER,
        token_multiple=TOKEN_MULTIPLE,
    )
    return Planned(found.plan, time.perf_counter() - start_s, found.n_candidates)


@cache
def static_trace(setup: Setup, global_batch: int = 256) -> Trace:
    """The reported batches of 64 devices, one step after the other."""
    batches = seen_batches(setup, global_batch, REPORTED, 1)
    return simulate(planned(setup).plan, batches, profile_of(setup), hardware=CLUSTER)


def static_step_s(setup: Setup) -> float:
    """Mean seconds of a step."""
    return static_trace(setup).makespan_s / REPORTED


def load_ratio(found: Outcome) -> float:
    """Device-seconds of the encoder over those of the LLM, for a sample of the tuned system."""
    spent = {"llm": 0.0, "encoder": 0.0}
    p = found.tuned.placement
    for s in p.segments:
        busy = float(np.mean([step.busy_s[s.name] for step in found.steps]))
        spent["llm" if s.module == "llm" else "encoder"] += busy * p.mesh_of(s).n_devices
    return spent["encoder"] / spent["llm"]
