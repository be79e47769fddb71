"""Steps of a placement at the true shapes of its microbatches, as systems with dynamic shapes run.

Here nothing is padded to a bucket: every microbatch's groups have shapes of their own, of the
samples that were dealt to it (`dealing`). Prices, task lists, simulator and memory are those of
everywhere.

Where all modules have equal data-parallel degrees, data ranks are replicas that meet only at the
end of a step. Otherwise all ranks exchange features at every microbatch, which then takes as long
as its slowest rank; what modules before the last compute is shared out evenly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflop_jax.hardware import Hardware
from dflop_jax.pipeline.order import in_flight_limit
from dflop_jax.plan.placement import Placement
from dflop_jax.plan.pricing import prices_of, step_end_seconds
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Bucket,
    Direction,
    Group,
    Load,
    ModelProfile,
    Plan,
    Schedule,
    SegmentPlan,
    Shape,
    SubmeshPlan,
    Trace,
)
from dflop_jax.sim import memory
from dflop_jax.sim.pipeline import simulate_step

Array = np.ndarray
DIRECTIONS: tuple[Direction, Direction] = (FORWARD, BACKWARD)
# (segment, direction) -> seconds of each microbatch on each data rank
Times = Mapping[tuple[str, Direction], Array]


@dataclass(frozen=True)
class ExactCosts:
    """A cost model and the links of its devices; without hardware nothing that crosses devices
    takes time. The amount of a module is counted in pieces where its rows take one, else tokens."""

    model: CostModel
    hardware: Hardware | None = None

    @property
    def profile(self) -> ModelProfile:
        return self.model.profile

    @property
    def last(self) -> str:
        """The last module, whose data ranks samples are dealt to."""
        return list(self.profile.n_layers)[-1]

    def amount(self, load: Load, module: str) -> int:
        tile = module in self.profile.piece_tokens
        return len(load.lengths(module)) if tile else load.tokens(module)

    def shape(self, module: str, amount: float) -> Shape | None:
        """The shape that holds an amount: all tokens stand in one row."""
        n = int(np.ceil(amount - 1e-9))
        tile = self.profile.piece_tokens.get(module)
        return (Shape(n, tile) if tile else Shape(1, n)) if n else None

    def segment_s(
        self, s: SegmentPlan, mesh: SubmeshPlan, direction: str, amount: Array, pairs: Array
    ) -> Array:
        """Seconds of a segment's task at each amount with its content; 0 where there is none."""
        amount = np.asarray(amount, float)
        tile = self.profile.piece_tokens.get(s.module)
        rows, tokens = (amount, tile) if tile else (1.0 * (amount > 0), amount)
        static_s = self.model.group_s(s, mesh.shape, 1, rows, tokens, direction)
        return static_s + self.model.group_pair_s(s, mesh.shape, 1, direction) * pairs

    def module_s(self, module: str, mesh: SubmeshPlan, amount: float, pairs: float) -> float:
        """Seconds of all layers and ends, forward and backward."""
        whole = SegmentPlan(module, module, 0, self.profile.n_layers[module], "", True, True)
        at = (np.array([amount]), np.array([pairs]))
        return float(sum(self.segment_s(whole, mesh, d, *at)[0] for d in DIRECTIONS))


def plan_of(costs: ExactCosts, placement: Placement, buckets: Sequence[Bucket] = ()) -> Plan:
    """The placement as a plan; without buckets to ask for its graph only."""
    some = (Bucket.of({placement.segments[0].module: Shape(1, 1)}),)
    return Plan(
        "exact",
        placement.submeshes,
        placement.segments,
        tuple(buckets) or some,
        edges=costs.profile.edges,
        tied=costs.profile.tied,
    )


def ranks_of(placement: Placement) -> dict[str, int]:
    """Data-parallel degree of each module."""
    return {s.module: placement.mesh_of(s).data for s in placement.segments}


def is_replicated(placement: Placement) -> bool:
    """Whether data ranks are replicas that meet only at the end of a step."""
    return len(set(ranks_of(placement).values())) == 1


@dataclass(frozen=True)
class Content:
    """By module, what each microbatch holds on each data rank, [microbatches, ranks]: amounts, and
    the sums of its pieces' squared tokens. A module that shares its amounts out evenly has a single
    column."""

    amount: Mapping[str, Array]
    pairs: Mapping[str, Array]


def content_of(
    costs: ExactCosts,
    placement: Placement,
    batch: Sequence[Load],
    bins: Array,
    n_microbatches: int,
) -> Content:
    """What samples in bins (microbatch * ranks of the last module + rank) add up to."""
    ranks = ranks_of(placement)
    n_bins = n_microbatches * ranks[costs.last]
    amounts, pairs = {}, {}
    for m in costs.profile.n_layers:
        counts = [costs.amount(load, m) for load in batch]
        squares = [float(sum(n * n for n in load.lengths(m))) for load in batch]
        both = [
            np.bincount(bins, np.array(x, float), n_bins).reshape(n_microbatches, -1)
            for x in (counts, squares)
        ]
        if m != costs.last and not is_replicated(placement):
            both = [x.sum(axis=1, keepdims=True) / ranks[m] for x in both]
            both[0] = np.ceil(both[0])
        amounts[m], pairs[m] = both
    return Content(amounts, pairs)


def rank_seconds(costs: ExactCosts, placement: Placement, content: Content) -> Times:
    """Seconds of every task on each data rank, [microbatches, ranks]."""
    return {
        (s.name, d): costs.segment_s(
            s, placement.mesh_of(s), d, content.amount[s.module], content.pairs[s.module]
        )
        for s in placement.segments
        for d in DIRECTIONS
    }


def segment_seconds(costs: ExactCosts, placement: Placement, content: Content) -> Times:
    """Seconds of every task, [replicas, microbatches]; one row, of the slowest rank each time,
    where data ranks are coupled."""
    replicated = is_replicated(placement)
    return {
        task: by_rank.T if replicated else by_rank.max(axis=1)[None]
        for task, by_rank in rank_seconds(costs, placement, content).items()
    }


def peak_bytes(costs: ExactCosts, placement: Placement, largest: Mapping[str, float]) -> float:
    """Bytes of the device that needs most, with `largest` amounts on a rank of each module."""
    bucket = Bucket.of({m: costs.shape(m, n) for m, n in largest.items()})
    plan = plan_of(costs, placement, (bucket,))
    return max(memory.peak_bytes(plan, costs.model, in_flight_limit(plan)).values())


def replica(
    costs: ExactCosts, placement: Placement, content: Content, r: int
) -> tuple[Plan, Schedule]:
    """The plan of one replica (or of the coupled whole) and its groups, at their exact shapes."""
    replicated = is_replicated(placement)
    if replicated:
        alone = tuple(replace(m, first=m.first + r * m.model, data=1) for m in placement.submeshes)
        placement = replace(placement, submeshes=alone)
    targets = plan_of(costs, placement).targets
    groups: list[Group] = []
    buckets: dict[Bucket, None] = {}
    for i in range(len(content.amount[costs.last])):
        shapes, pairs = {}, {}
        for m, amount in content.amount.items():
            columns = slice(r, r + 1) if replicated else slice(None)
            shape = costs.shape(m, float(amount[i, columns].max()))
            if shape is not None:
                shapes[m], pairs[m] = shape, int(content.pairs[m][i, columns].max())
        if not shapes:
            continue
        place = {m: len(groups) + k for k, m in enumerate(shapes)}
        for m, shape in shapes.items():
            feeds = tuple(place[t] for t in targets(m) if t in place)
            groups.append(Group(m, shape, ((),), feeds, pairs[m]))
        buckets[Bucket.of(shapes)] = None
    return plan_of(costs, placement, tuple(buckets)), Schedule(0, tuple(groups))


def replica_trace(
    costs: ExactCosts, placement: Placement, content: Content, r: int
) -> tuple[Trace, Plan, Schedule]:
    """One replica (or the coupled whole) simulated, the step's end over all data ranks included."""
    plan, schedule = replica(costs, placement, content, r)
    ends = step_end_seconds(plan_of(costs, placement), costs.profile, costs.hardware)
    prices = replace(prices_of(plan, costs.model, costs.hardware), step_end=ends)
    # Devices of a placement compute at once, whatever the profile's did.
    prices = replace(prices, concurrency=float("inf"))
    return simulate_step(plan, schedule, prices, [s.name for s in plan.segments]), plan, schedule


@dataclass(frozen=True)
class ExactStep:
    """One step. `idle_share`: of all devices' time; `busy_s`: seconds that each segment computes
    (the mean over its data ranks); `trace`: of the slowest replica, with its plan and schedule."""

    makespan_s: float
    idle_share: float
    busy_s: Mapping[str, float]
    trace: Trace
    plan: Plan
    schedule: Schedule


def run_bins(
    costs: ExactCosts,
    placement: Placement,
    batch: Sequence[Load],
    bins: Array,
    n_microbatches: int,
) -> ExactStep:
    """Simulate one step of a batch whose samples lie in given bins."""
    content = content_of(costs, placement, batch, bins, n_microbatches)
    n_replicas = ranks_of(placement)[costs.last] if is_replicated(placement) else 1
    runs = [replica_trace(costs, placement, content, r) for r in range(n_replicas)]
    trace, plan, schedule = max(runs, key=lambda run: run[0].makespan_s)
    fused = placement.segments[-1].name  # its forward is part of its backward
    busy: dict[str, float] = {}
    for (name, direction), by_rank in rank_seconds(costs, placement, content).items():
        if (name, direction) != (fused, FORWARD):
            busy[name] = busy.get(name, 0.0) + float(by_rank.sum(axis=0).mean())
    spent = sum(busy[s.name] * placement.mesh_of(s).n_devices for s in placement.segments)
    used = len({d for m in placement.submeshes for d in m.devices})
    idle = 1.0 - spent / (used * trace.makespan_s)
    return ExactStep(trace.makespan_s, idle, busy, trace, plan, schedule)
