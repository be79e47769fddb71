"""Memory of each submesh: its peak by counting groups in flight, and its course over a trace."""

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

    constant_bytes: of each submesh: parameters, gradients, optimizer state and the largest
    program's temporaries. group_bytes: by (segment, shape), of a group from forward to backward:
    its input and residuals. second_group_bytes: the same under the second recompute policies.
    """

    constant_bytes: Mapping[str, float]
    group_bytes: Mapping[tuple[str, Shape], float]
    second_group_bytes: Mapping[tuple[str, Shape], float] = field(default_factory=dict)


# Of a segment: its resource, bytes that it holds all the time, groups in flight included, and bytes
# of temporaries while one of its programs runs.
SegmentNeed = tuple[int, Array, Array]


def segment_need(resource: int, n_bytes: SegmentBytes, in_flight: Array) -> SegmentNeed:
    """The need of a segment with so many groups in flight."""
    return resource, n_bytes.state + n_bytes.residuals * in_flight, n_bytes.temporaries


def resource_peaks(needs: Iterable[SegmentNeed]) -> dict[int, Array]:
    """Peak bytes per device of each resource: all that its segments hold, and the temporaries of
    one program at a time."""
    live: dict[int, Array] = {}
    work: dict[int, Array] = {}
    for resource, segment_bytes, temporaries in needs:
        live[resource] = live.get(resource, 0.0) + segment_bytes
        work[resource] = np.maximum(work.get(resource, 0.0), temporaries)
    return {r: live[r] + work[r] for r in live}


def peak_bytes(
    layout: Layout,
    costs: CostModel,
    in_flight: Mapping[str, int],
    trainable: Collection[str] | None = None,
) -> dict[str, float]:
    """Peak bytes per device of each submesh, with `in_flight[segment]` groups between forward and
    backward, each of the module's largest shape and under the segment's own recompute policy;
    programs of either policy have room. `trainable` names the segments that train; None: all.
    """
    resource_of = submesh_resources(layout)
    trained = {s.name for s in layout.segments} if trainable is None else set(trainable)
    backward = set(segments_with_backward(layout, trained))

    def largest_bytes(s: SegmentPlan) -> SegmentBytes:
        return costs.max_segment_bytes(
            s, layout, trained=s.name in trained, backward=s.name in backward
        )

    def need(s: SegmentPlan) -> SegmentNeed:
        n_bytes = largest_bytes(s)
        if s.remat_less is not None:
            work = np.maximum(n_bytes.temporaries, largest_bytes(s.with_less_remat).temporaries)
            n_bytes = replace(n_bytes, temporaries=work)
        return segment_need(resource_of[s.submesh], n_bytes, in_flight.get(s.name, 0))

    peaks = resource_peaks(map(need, layout.segments))
    return {name: float(peaks.get(r, 0.0)) for name, r in resource_of.items()}


def byte_table(layout: Layout, profile: ModelProfile) -> ByteTable:
    """Bytes that a profile predicts for a layout.

    Raises:
      ValueError: the profile lacks a module or degree of the layout.
    """
    costs = CostModel(profile)
    shapes = [(s, shape) for s in layout.segments for shape in layout.shapes(s.module)]
    return ByteTable(
        peak_bytes(layout, costs, {}),
        {(s.name, shape): group_bytes(layout, costs, s, shape) for s, shape in shapes},
        {
            (s.name, shape): group_bytes(layout, costs, s.with_less_remat, shape)
            for s, shape in shapes
            if s.remat_less is not None
        },
    )


def group_bytes(layout: Layout, costs: CostModel, s: SegmentPlan, shape: Shape) -> float:
    """Bytes per device of a group in a segment from forward to backward: input and residuals."""
    mesh = layout.submesh(s.submesh).shape
    predictions = costs.predict(s.module, mesh.model, shape.rows, shape.tokens)
    n_bytes = costs.segment(s, mesh).n_bytes(
        layout.group_size, predictions, trained=True, backward=True
    )
    return float(n_bytes.residuals)


def memory_over_time(
    layout: Layout,
    trace: Trace,
    shapes: Mapping[int, Shape],
    table: ByteTable,
    second_remat: Collection[tuple[str, int]] = (),
) -> dict[str, StepFunction]:
    """Bytes per device of each submesh while the trace runs.

    A group's bytes count from when its input arrives until its backward ends, or its forward where
    the segment runs no backward. The input arrives when the module's segment before it, or the send
    of that one, ends; in a module's first segment when the group begins, since a trace does not
    name the groups that other modules send.

    Args:
      shapes: shape of each group of the trace; groups that are absent hold nothing.
      second_remat: (segment, group) that run under the segment's second recompute policy.
    """
    submesh_of = {s.name: s.submesh for s in layout.segments}
    previous = {x.target: x.source for x in segment_links(layout) if x.edge is None}
    arrived_s: dict[tuple[str, str, int], float] = {}  # by submesh or link, sender and group
    for e in trace.events:
        if e.direction in (FORWARD, SEND):
            arrived_s.setdefault((e.submesh, e.segment, e.group), e.end_s)
    changes: dict[str, dict[float, float]] = {m.name: {0.0: 0.0} for m in layout.submeshes}
    events = {(e.segment, e.group, e.direction): e for e in trace.events}
    for name, group in dict.fromkeys((e.segment, e.group) for e in trace.events):
        tasks = [events[k] for d in (FORWARD, BACKWARD) if (k := (name, group, d)) in events]
        is_second = (name, group) in second_remat
        by_shape = table.second_group_bytes if is_second else table.group_bytes
        n_bytes = by_shape.get((name, shapes[group]), 0.0) if group in shapes else 0.0
        if not tasks or not n_bytes:
            continue
        submesh, sender = submesh_of[name], previous.get(name, "")
        sender_mesh = submesh_of.get(sender, "")
        sent_s = arrived_s.get((sender_mesh, sender, group), tasks[0].start_s)
        first_s = arrived_s.get((f"{sender_mesh} → {submesh}", sender, group), sent_s)
        for time_s, more_bytes in ((first_s, n_bytes), (tasks[-1].end_s, -n_bytes)):
            changes[submesh][time_s] = changes[submesh].get(time_s, 0.0) + more_bytes
    return {
        name: _step_function(change, table.constant_bytes.get(name, 0.0), trace.makespan_s)
        for name, change in changes.items()
    }


def memory_of_trace(
    layout: Layout, profile: ModelProfile, trace: Trace, shapes_by_name: Mapping[int, str]
) -> dict[str, StepFunction]:
    """`memory_over_time` of a saved trace, whose groups are named "module:ROWSxTOKENS", with
    " +SEGMENT" for each that runs them under its second recompute policy.

    Raises:
      ValueError: a group's shape is not known, or the trace is of another plan.
    """
    known = {f"{m}:{shape.name}": shape for m in layout.modules for shape in layout.shapes(m)}
    groups = {e.group for e in trace.events if e.group >= 0}
    words = {g: shapes_by_name.get(g, "").split(" +") for g in groups}
    if any(name not in known for name, *_ in words.values()):
        raise ValueError("the trace does not name a shape of the plan for every group")
    if {e.segment for e in trace.events} - {s.name for s in layout.segments}:
        raise ValueError("the trace is of another plan")
    shapes = {g: known[name] for g, (name, *_) in words.items()}
    second = {(segment, g) for g, (_, *segments) in words.items() for segment in segments}
    return memory_over_time(layout, trace, shapes, byte_table(layout, profile), second)


def _step_function(changes: Mapping[float, float], start: float, end_s: float) -> StepFunction:
    points: list[tuple[float, float]] = []
    residual_bytes = 0.0
    for time_s in sorted(changes):
        residual_bytes += changes[time_s]
        points.append((time_s, start + max(0.0, residual_bytes)))
    return (*points, (end_s, points[-1][1])) if points[-1][0] < end_s else tuple(points)
