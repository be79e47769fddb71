"""What placements cost at the true shapes of microbatches: seconds, bytes and the step's end.

A load is what a microbatch holds on a data rank: items of an encoder; tokens of the LLM and the sum
of its samples' squared lengths, which attention costs when samples stand in one row unpadded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflop_jax.hardware import Hardware
from dflop_jax.pipeline.order import in_flight_limit, resources
from dflop_jax.plan.links import step_end_seconds
from dflop_jax.plan.placement import Placement
from dflop_jax.profile.fit import CostModel
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    ITEMS,
    REDUCE,
    UPDATE,
    Bucket,
    ModelProfile,
    Plan,
    SampleShape,
    SegmentPlan,
    SubmeshPlan,
)
from dflop_jax.sim import memory

Array = np.ndarray
DIRECTIONS = (FORWARD, BACKWARD)
# (segment, direction) -> seconds, of each microbatch
Times = Mapping[tuple[str, str], Array]


@dataclass(frozen=True)
class ExactCosts:
    """A cost model, asked for true loads; without hardware nothing that crosses devices takes
    time."""

    model: CostModel
    hardware: Hardware | None = None

    @property
    def profile(self) -> ModelProfile:
        return self.model.profile

    def segment_s(
        self, s: SegmentPlan, mesh: SubmeshPlan, direction: str, load: Array, squares: Array
    ) -> Array:
        """Of a segment's task at each load; 0 without load."""
        load = np.asarray(load, float)
        if s.module == "llm":
            # As many equal samples as have this many tokens and these squares.
            each = np.divide(squares, load, out=np.ones_like(load), where=load > 0)
            return self.model.group_s(s, mesh.shape, 1, load / each, each, direction)
        tokens = self.profile.item_tokens[s.module]
        return self.model.group_s(s, mesh.shape, 1, load, tokens, direction)

    def module_s(self, module: str, mesh: SubmeshPlan, load: float, squares: float) -> float:
        """Of all layers and ends, forward and backward."""
        whole = SegmentPlan(module, module, 0, self.profile.n_layers[module], "", True, True)
        at = (np.array([load]), np.array([squares]))
        return float(sum(self.segment_s(whole, mesh, d, *at)[0] for d in DIRECTIONS))


@dataclass(frozen=True)
class Loads:
    """What each microbatch of a batch holds on each data rank, [microbatches, ranks]."""

    items: Mapping[str, Array]
    tokens: Array
    squares: Array

    def of(self, module: str) -> Array:
        return self.tokens if module == "llm" else self.items[module]


def ranks_of(placement: Placement) -> dict[str, int]:
    """Data-parallel degree of each module."""
    return {s.module: placement.mesh_of(s).data for s in placement.segments}


def is_replicated(placement: Placement) -> bool:
    """Whether data ranks are replicas that meet only at the end of a step."""
    return len(set(ranks_of(placement).values())) == 1


def sum_loads(
    batch: Sequence[SampleShape], bins: Array, n_microbatches: int, ranks: Mapping[str, int]
) -> Loads:
    """Sums over the samples of each bin (microbatch * LLM ranks + rank)."""
    n_bins = n_microbatches * ranks["llm"]

    def total(values: Sequence[float]) -> Array:
        return np.bincount(bins, np.array(values, float), n_bins).reshape(n_microbatches, -1)

    return Loads(
        {k: total([s.load(k) for s in batch]) for k in ranks if k != "llm"},
        total([s.llm_tokens for s in batch]),
        total([float(s.llm_tokens) ** 2 for s in batch]),
    )


def rank_seconds(costs: ExactCosts, placement: Placement, loads: Loads) -> Times:
    """Seconds of every task on each data rank, [microbatches, ranks]."""
    found = {}
    for s in placement.segments:
        mesh = placement.mesh_of(s)
        load, squares = loads.of(s.module), loads.squares
        if s.module != "llm" and not is_replicated(placement):
            load = squares = np.ceil(load.sum(axis=1, keepdims=True) / mesh.data)
        for d in DIRECTIONS:
            found[s.name, d] = costs.segment_s(s, mesh, d, load, squares)
    return found


def segment_seconds(costs: ExactCosts, placement: Placement, loads: Loads) -> Times:
    """Seconds of every task, [replicas, microbatches]; one row, of the slowest rank each time,
    where data ranks are coupled."""
    replicated = is_replicated(placement)
    return {
        task: each.T if replicated else each.max(axis=1)[None]
        for task, each in rank_seconds(costs, placement, loads).items()
    }


def largest_load(placement: Placement, loads: Sequence[Loads]) -> dict[str, float]:
    """Of a rank, by module."""
    ranks = ranks_of(placement)
    found = {}
    for m in ranks:
        each = [x.of(m) for x in loads]
        if m != "llm" and not is_replicated(placement):
            each = [np.ceil(x.sum(axis=1) / ranks[m]) for x in each]
        found[m] = max(float(x.max()) for x in each)
    return found


def peak_bytes(costs: ExactCosts, placement: Placement, load: Mapping[str, float]) -> float:
    """Bytes of the device that needs most, with `load` as the largest on a rank of each module."""
    items = {ITEMS[m]: math.ceil(n) for m, n in load.items() if m != "llm"}
    tokens = max(1, math.ceil(load["llm"]))
    plan = plan_of(placement, (Bucket(items.get("tiles", 0), tokens, 1, items.get("windows", 0)),))
    return max(memory.peak_bytes(plan, costs.model, in_flight_limit(plan)).values())


def resources_of(placement: Placement) -> dict[str, int]:
    return resources(plan_of(placement))


def plan_of(placement: Placement, buckets: tuple[Bucket, ...] = (Bucket(1, 1),)) -> Plan:
    return Plan("exact", placement.submeshes, placement.segments, buckets)


def replica_plan(placement: Placement, loads: Loads, r: int) -> Plan:
    """The plan of one replica (or of the coupled whole); its buckets are the exact shapes of its
    microbatches."""
    replicated, ranks = is_replicated(placement), ranks_of(placement)
    submeshes = placement.submeshes
    if replicated:
        submeshes = tuple(replace(m, first=m.first + r * m.model, data=1) for m in submeshes)

    def held(module: str) -> list[int]:
        each = loads.items.get(module, np.zeros_like(loads.tokens))
        each = each[:, r] if replicated else each.sum(axis=1) / ranks.get(module, 1)
        return [math.ceil(n) for n in each]

    tokens = loads.tokens[:, r] if replicated else loads.tokens.max(axis=1)
    buckets = tuple(
        Bucket(tiles, max(1, int(n)), 1, windows)
        for tiles, n, windows in zip(held("vision"), tokens, held("audio"))
    )
    return Plan("exact", submeshes, placement.segments, buckets)


def step_end_s(costs: ExactCosts, placement: Placement) -> float:
    """Seconds after the last backward: all stages add up their gradients at once, then update."""
    ends = step_end_seconds(plan_of(placement), costs.profile, costs.hardware)
    of = resources_of(placement)
    spent: dict[str, dict[int, float]] = {REDUCE: {}, UPDATE: {}}
    for s in placement.segments:
        for task, seconds in ends.items():
            if task.segment == s.name:
                at = spent[task.direction]
                at[of[s.submesh]] = at.get(of[s.submesh], 0.0) + seconds
    return sum(max(at.values()) for at in spent.values())
