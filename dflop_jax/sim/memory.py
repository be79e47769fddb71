"""Memory of each submesh over time, from a trace of either source and a table of bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from dflop_jax.pipeline.order import resources, upstream
from dflop_jax.profile.fit import CostModel
from dflop_jax.records import BACKWARD, FORWARD, SEND, ModelProfile, Plan, Trace

# (time in seconds, bytes from then on), times rising; the last point is the trace's end.
StepFunction = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class ByteTable:
    """Bytes per device.

    `constant` of each submesh: parameters, gradients, optimizer state and the largest program's
    temporaries. `kept` by (segment, bucket index): the input that a group of that bucket holds.
    """

    constant: Mapping[str, float]
    kept: Mapping[tuple[str, int], float]


def peak_bytes(
    plan: Plan,
    costs: CostModel,
    in_flight: Mapping[str, int],
    trainable: Collection[str] | None = None,
) -> dict[str, float]:
    """Most bytes per device of each submesh, with `in_flight[segment]` groups kept.

    Submeshes that share devices hold what all of them hold, and the temporaries of one program
    at a time. `trainable` as for `simulate`.
    """
    of = resources(plan)
    steady: dict[int, float] = dict.fromkeys(of.values(), 0.0)
    work = dict(steady)
    for s in plan.segments:
        shapes = [b.shape_of(s.module, costs.profile.item_tokens) for b in plan.buckets]
        items, tokens = np.array([(a.items, a.tokens) for a in shapes]).T
        trained = trainable is None or s.name in trainable
        mesh = plan.submesh(s.submesh).shape
        found = costs.segment_bytes(s, mesh, plan.group_size, items, tokens, trained=trained)
        steady[of[s.submesh]] += float(found.state + found.kept.max() * in_flight[s.name])
        work[of[s.submesh]] = max(work[of[s.submesh]], float(found.temporaries.max()))
    return {name: steady[r] + work[r] for name, r in of.items()}


def byte_table(plan: Plan, profile: ModelProfile) -> ByteTable:
    """Bytes that a profile predicts for a plan.

    Raises:
      ValueError: the profile lacks a module or degree that the plan uses.
    """
    costs = CostModel(profile)
    names = [s.name for s in plan.segments]
    kept: dict[tuple[str, int], float] = {}
    for s in plan.segments:
        for b, bucket in enumerate(plan.buckets):
            shape = bucket.shape_of(s.module, profile.item_tokens)
            if shape.items:
                model = plan.submesh(s.submesh).model
                one = float(costs.predict(s.module, model, shape.items, shape.tokens, "hidden"))
                kept[s.name, b] = one * plan.group_size
    return ByteTable(peak_bytes(plan, costs, dict.fromkeys(names, 0)), kept)


def memory_over_time(
    plan: Plan, trace: Trace, buckets: Mapping[int, int], table: ByteTable
) -> dict[str, StepFunction]:
    """Bytes per device of each submesh of the plan while the trace runs.

    A segment holds a group's input from when it arrives (the first of its producers, or of their
    sends, ends; without a producer from when the segment begins) until its backward ends, or its
    forward where it runs no backward.

    Args:
      buckets: index of the bucket of each group of the trace; groups that are absent hold nothing.
    """
    submesh = {s.name: s.submesh for s in plan.segments}
    below = {s.name: [u.name for u in upstream(plan, s)] for s in plan.segments}
    spans = {(e.segment, e.group, e.direction): (e.start_s, e.end_s) for e in trace.events}
    changes: dict[str, dict[float, float]] = {m.name: {0.0: 0.0} for m in plan.submeshes}
    for name, group in dict.fromkeys((e.segment, e.group) for e in trace.events):
        runs = [spans[k] for d in (FORWARD, BACKWARD) if (k := (name, group, d)) in spans]
        size = table.kept.get((name, buckets[group]), 0.0) if group in buckets else 0.0
        if not runs or not size:
            continue
        arrivals = [
            spans.get((u, group, SEND), spans[u, group, FORWARD])[1]
            for u in below[name]
            if (u, group, FORWARD) in spans
        ]
        change = changes[submesh[name]]
        for time_s, by in ((min(arrivals, default=runs[0][0]), size), (runs[-1][1], -size)):
            change[time_s] = change.get(time_s, 0.0) + by
    return {
        name: _accumulated(change, table.constant.get(name, 0.0), trace.makespan_s)
        for name, change in changes.items()
    }


def memory_of_run(
    plan: Plan, profile: ModelProfile, trace: Trace, buckets: Mapping[int, str]
) -> dict[str, StepFunction]:
    """`memory_over_time` of a saved trace, whose groups' buckets are known by name.

    Raises:
      ValueError: a group's bucket is not known, or the profile is not of this plan.
    """
    index = {bucket.name: b for b, bucket in enumerate(plan.buckets)}
    groups = {e.group for e in trace.events if e.group >= 0}
    if any(buckets.get(g) not in index for g in groups):
        raise ValueError("the trace does not name a bucket of the plan for every group")
    if {e.segment for e in trace.events} - {s.name for s in plan.segments}:
        raise ValueError("the trace is of another plan")
    return memory_over_time(
        plan, trace, {g: index[buckets[g]] for g in groups}, byte_table(plan, profile)
    )


def _accumulated(changes: Mapping[float, float], start: float, end_s: float) -> StepFunction:
    points: list[tuple[float, float]] = []
    held = 0.0
    for time_s in sorted(changes):
        held += changes[time_s]
        points.append((time_s, start + max(0.0, held)))
    return (*points, (end_s, points[-1][1])) if points[-1][0] < end_s else tuple(points)


def peaks(curves: Mapping[str, StepFunction]) -> dict[str, float]:
    """Most bytes per device that each submesh holds at any time."""
    return {name: max(held for _, held in points) for name, points in curves.items()}
