"""DFLOP's plan as this runtime runs it: microbatches padded to a few compiled shapes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from dflop_jax.plan.exact_costs import reduce_s, sends_of
from dflop_jax.records import Bucket, Plan, Trace
from dflop_jax.schedule.buckets import choose_buckets
from dflop_jax.schedule.online import capacity_of
from dflop_jax.sim.predict import bucket_costs, simulate
from experiments.paper import data
from experiments.paper.common import REPORTED, Outcome, outcome, say, seen_batches
from experiments.paper.systems import Setup

BUCKETS = 4
LOOKAHEAD = 2  # groups in flight beyond 1F1B's, so that unlike ones do not leave a stage waiting


@cache
def static_plan(setup: Setup) -> Plan:
    """The placement that `outcome(setup, "dflop")` found, with buckets chosen for it."""
    found = outcome(setup, "dflop")
    say(f"{setup.name}: buckets")
    shapes = data.profile(setup.mixture, setup.layout).shapes
    p, costs = found.tuned.placement, found.costs
    draft = Plan("dflop", p.submeshes, p.segments, (Bucket(1, 1),), lookahead=LOOKAHEAD)
    names = [s.name for s in p.segments]
    room = capacity_of(draft)

    def seconds(bucket: Bucket) -> tuple[float, ...]:
        one = replace(draft, buckets=(bucket,))
        return bucket_costs(one, costs.model.task_seconds(one), names).seconds[0]

    chosen = choose_buckets(
        shapes,
        global_batch=found.global_batch,
        n_buckets=BUCKETS,
        vision_ranks=room.vision_ranks,
        llm_ranks=room.llm_ranks,
        audio_ranks=room.audio_ranks,
        seconds=seconds,
        max_microbatches=found.tuned.n_microbatches,
        effort="quick",
    )
    return replace(draft, buckets=chosen.buckets)


@cache
def static_trace(setup: Setup, n: int = REPORTED) -> Trace:
    """The reported batches, one after the other, without the steps' ends."""
    found, plan = outcome(setup, "dflop"), static_plan(setup)
    batches = seen_batches(setup, found.global_batch, n, 1)
    return simulate(plan, batches, found.costs.profile, sends=sends_of(found.costs, plan))


def static_step_s(setup: Setup) -> float:
    """Mean seconds of a step."""
    found = outcome(setup, "dflop")
    return static_trace(setup).makespan_s / REPORTED + reduce_s(found.costs, found.tuned.placement)


def load_ratio(found: Outcome) -> float:
    """Device-seconds of the encoder over those of the LLM, for a sample of the tuned system."""
    spent = {"llm": 0.0, "encoder": 0.0}
    p = found.tuned.placement
    for s in p.segments:
        busy = float(np.mean([step.busy_s[s.name] for step in found.steps]))
        spent["llm" if s.module == "llm" else "encoder"] += busy * p.mesh_of(s).n_devices
    return spent["encoder"] / spent["llm"]
