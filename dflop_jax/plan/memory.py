"""Memory of each submesh: its peak by counting, and its course over a trace of either source."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from dflop_jax.profile.cost_model import CostModel
from dflop_jax.profile.state import Array, SegmentBytes
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    SEND,
    Layout,
    ModelProfile,
    SegmentPlan,
    Shape,
    Trace,
)
from dflop_jax.simulate.task_graph import segment_links, segments_with_backward, submesh_resources

# (time in seconds, bytes from then on), times rising; the last point is the trace's end.
StepFunction = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class ByteTable:
    """Bytes per device.

    `constant` of each submesh: parameters, gradients, optimizer state and the largest program's
    temporaries. `kept` by (segment, shape): what a group of that shape holds from forward to
    backward, its input and what forward hands over; `keeping` the same under the segment's second
    recompute policy, where it has one.
    """

    constant: Mapping[str, float]
    kept: Mapping[tuple[str, Shape], float]
    keeping: Mapping[tuple[str, Shape], float] = field(default_factory=dict)


# What a segment needs of a device: the resource that it lies on, bytes that it holds all the time,
# groups in flight included, and bytes of temporaries while one of its programs runs.
Need = tuple[int, Array, Array]


def need_of(resource: int, n_bytes: SegmentBytes, in_flight: Array) -> Need:
    """What a segment with so many groups in flight needs."""
    return resource, n_bytes.state + n_bytes.kept * in_flight, n_bytes.temporaries


def peaks_of(needs: Iterable[Need]) -> dict[int, Array]:
    """Peak bytes per device of each resource. Segments on the same devices hold what all of them
    hold, and the temporaries of one program at a time."""
    steady: dict[int, Array] = {}
    work: dict[int, Array] = {}
    for resource, held, temporaries in needs:
        steady[resource] = steady.get(resource, 0.0) + held
        work[resource] = np.maximum(work.get(resource, 0.0), temporaries)
    return {r: steady[r] + work[r] for r in steady}


def peak_bytes(
    layout: Layout,
    costs: CostModel,
    in_flight: Mapping[str, int],
    trainable: Collection[str] | None = None,
) -> dict[str, float]:
    """Peak bytes per device of each submesh, with `in_flight[segment]` groups kept.

    The groups in flight are those of an order (`task_order.peak_groups_in_flight`), each of the
    module's largest shape, and run under their segments' own recompute policies; programs of
    either policy have room. `trainable` names the segments that train; None: all.
    """
    resource = submesh_resources(layout)
    trains = {s.name for s in layout.segments} if trainable is None else set(trainable)
    backward = set(segments_with_backward(layout, trains))

    def most(s: SegmentPlan) -> SegmentBytes:
        return costs.largest_bytes(
            s,
            layout.submesh(s.submesh).shape,
            layout.group_size,
            layout.shapes(s.module),
            trained=s.name in trains,
            backward=s.name in backward,
        )

    def need(s: SegmentPlan) -> Need:
        n_bytes = most(s)
        if s.remat_less is not None:
            work = np.maximum(n_bytes.temporaries, most(s.keeping).temporaries)
            n_bytes = replace(n_bytes, temporaries=work)
        return need_of(resource[s.submesh], n_bytes, in_flight.get(s.name, 0))

    peaks = peaks_of(map(need, layout.segments))
    return {name: float(peaks.get(r, 0.0)) for name, r in resource.items()}


def byte_table(layout: Layout, profile: ModelProfile) -> ByteTable:
    """Bytes that a profile predicts for a plan.

    Raises:
      ValueError: the profile lacks a module or degree that the plan uses.
    """
    costs = CostModel(profile)
    kept: dict[tuple[str, Shape], float] = {}
    keeping: dict[tuple[str, Shape], float] = {}
    for s in layout.segments:
        for shape in layout.shapes(s.module):
            kept[s.name, shape] = kept_bytes(layout, costs, s, shape)
            if s.remat_less is not None:
                keeping[s.name, shape] = kept_bytes(layout, costs, s.keeping, shape)
    return ByteTable(peak_bytes(layout, costs, {}), kept, keeping)


def kept_bytes(layout: Layout, costs: CostModel, s: SegmentPlan, shape: Shape) -> float:
    """Bytes per device that a segment holds of a group from forward to backward."""
    mesh = layout.submesh(s.submesh).shape
    return float(costs.segment_bytes(s, mesh, layout.group_size, shape.rows, shape.tokens).kept)


def memory_over_time(
    layout: Layout,
    trace: Trace,
    shapes: Mapping[int, Shape],
    table: ByteTable,
    keeping: Collection[tuple[str, int]] = (),
) -> dict[str, StepFunction]:
    """Bytes per device of each submesh of the plan while the trace runs.

    A segment holds a group's input from when it arrives (its module's segment before it, or that
    one's send, ends; for a module's first segment from when it begins: a trace does not name the
    groups that other modules send) until its backward ends, or its forward where it runs no
    backward. What forward hands to backward counts from then on as well.

    Args:
      shapes: shape of each group of the trace; groups that are absent hold nothing.
      keeping: (segment, group) that run under the segment's second recompute policy.
    """
    submesh = {s.name: s.submesh for s in layout.segments}
    before = {link.target: link.source for link in segment_links(layout) if link.edge is None}
    arrived_s: dict[tuple[str, str, int], float] = {}  # by submesh or link, sender and group
    for e in trace.events:
        if e.direction in (FORWARD, SEND):
            arrived_s.setdefault((e.submesh, e.segment, e.group), e.end_s)
    changes: dict[str, dict[float, float]] = {m.name: {0.0: 0.0} for m in layout.submeshes}
    spans = {(e.segment, e.group, e.direction): e for e in trace.events}
    for name, group in dict.fromkeys((e.segment, e.group) for e in trace.events):
        runs = [spans[k] for d in (FORWARD, BACKWARD) if (k := (name, group, d)) in spans]
        held = table.keeping if (name, group) in keeping else table.kept
        size = held.get((name, shapes[group]), 0.0) if group in shapes else 0.0
        if not runs or not size:
            continue
        here, sender = submesh[name], before.get(name, "")
        ended_s = arrived_s.get((submesh.get(sender, ""), sender, group), runs[0].start_s)
        first_s = arrived_s.get((f"{submesh.get(sender)} → {here}", sender, group), ended_s)
        for time_s, by in ((first_s, size), (runs[-1].end_s, -size)):
            changes[here][time_s] = changes[here].get(time_s, 0.0) + by
    return {
        name: _accumulated(change, table.constant.get(name, 0.0), trace.makespan_s)
        for name, change in changes.items()
    }


def memory_of_run(
    layout: Layout, profile: ModelProfile, trace: Trace, shapes_by_name: Mapping[int, str]
) -> dict[str, StepFunction]:
    """`memory_over_time` of a saved trace, whose groups are known as "module:ROWSxTOKENS", with
    " +SEGMENT" for each that runs them under its second recompute policy.

    Raises:
      ValueError: a group's shape is not known, or the profile is not of this plan.
    """
    known = {f"{m}:{shape.name}": shape for m in layout.modules for shape in layout.shapes(m)}
    groups = {e.group for e in trace.events if e.group >= 0}
    named = {g: shapes_by_name.get(g, "").split(" +") for g in groups}
    if any(name not in known for name, *_ in named.values()):
        raise ValueError("the trace does not name a shape of the plan for every group")
    if {e.segment for e in trace.events} - {s.name for s in layout.segments}:
        raise ValueError("the trace is of another plan")
    shapes = {g: known[name] for g, (name, *_) in named.items()}
    keeping = {(segment, g) for g, (_, *segments) in named.items() for segment in segments}
    return memory_over_time(layout, trace, shapes, byte_table(layout, profile), keeping)


def _accumulated(changes: Mapping[float, float], start: float, end_s: float) -> StepFunction:
    points: list[tuple[float, float]] = []
    inputs = 0.0
    for time_s in sorted(changes):
        inputs += changes[time_s]
        points.append((time_s, start + max(0.0, inputs)))
    return (*points, (end_s, points[-1][1])) if points[-1][0] < end_s else tuple(points)
