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

    constant_bytes: Mapping[str, float]
    group_bytes: Mapping[tuple[str, Shape], float]
    second_group_bytes: Mapping[tuple[str, Shape], float] = field(default_factory=dict)


# What a segment needs of a device: the resource that it lies on, bytes that it holds all the time,
# groups in flight included, and bytes of temporaries while one of its programs runs.
SegmentNeed = tuple[int, Array, Array]


def segment_need(resource: int, n_bytes: SegmentBytes, in_flight: Array) -> SegmentNeed:
    """What a segment with so many groups in flight needs."""
    return resource, n_bytes.state + n_bytes.residuals * in_flight, n_bytes.temporaries


def resource_peaks(needs: Iterable[SegmentNeed]) -> dict[int, Array]:
    """Peak bytes per device of each resource. Segments on the same devices hold what all of them
    hold, and the temporaries of one program at a time."""
    live_bytes: dict[int, Array] = {}
    temporary_bytes: dict[int, Array] = {}
    for resource, segment_bytes, temporaries in needs:
        live_bytes[resource] = live_bytes.get(resource, 0.0) + segment_bytes
        temporary_bytes[resource] = np.maximum(temporary_bytes.get(resource, 0.0), temporaries)
    return {r: live_bytes[r] + temporary_bytes[r] for r in live_bytes}


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
    resource_of = submesh_resources(layout)
    trained_segments = {s.name for s in layout.segments} if trainable is None else set(trainable)
    backward_segments = set(segments_with_backward(layout, trained_segments))

    def largest_bytes(s: SegmentPlan) -> SegmentBytes:
        return costs.max_segment_bytes(
            s,
            layout.submesh(s.submesh).shape,
            layout.group_size,
            layout.shapes(s.module),
            trained=s.name in trained_segments,
            backward=s.name in backward_segments,
        )

    def need(s: SegmentPlan) -> SegmentNeed:
        n_bytes = largest_bytes(s)
        if s.remat_less is not None:
            temporaries = np.maximum(
                n_bytes.temporaries, largest_bytes(s.with_less_remat).temporaries
            )
            n_bytes = replace(n_bytes, temporaries=temporaries)
        return segment_need(resource_of[s.submesh], n_bytes, in_flight.get(s.name, 0))

    peaks = resource_peaks(map(need, layout.segments))
    return {name: float(peaks.get(r, 0.0)) for name, r in resource_of.items()}


def byte_table(layout: Layout, profile: ModelProfile) -> ByteTable:
    """Bytes that a profile predicts for a plan.

    Raises:
      ValueError: the profile lacks a module or degree that the plan uses.
    """
    costs = CostModel(profile)
    first_group_bytes: dict[tuple[str, Shape], float] = {}
    second_group_bytes: dict[tuple[str, Shape], float] = {}
    for s in layout.segments:
        for shape in layout.shapes(s.module):
            first_group_bytes[s.name, shape] = group_bytes(layout, costs, s, shape)
            if s.remat_less is not None:
                second_group_bytes[s.name, shape] = group_bytes(
                    layout, costs, s.with_less_remat, shape
                )
    return ByteTable(peak_bytes(layout, costs, {}), first_group_bytes, second_group_bytes)


def group_bytes(layout: Layout, costs: CostModel, s: SegmentPlan, shape: Shape) -> float:
    """Bytes per device that a segment holds of a group from forward to backward."""
    mesh = layout.submesh(s.submesh).shape
    predictions = costs.predict(s.module, mesh.model, shape.rows, shape.tokens)
    return float(costs.segment(s, mesh).n_bytes(layout.group_size, predictions).residuals)


def memory_over_time(
    layout: Layout,
    trace: Trace,
    shapes: Mapping[int, Shape],
    table: ByteTable,
    second_remat: Collection[tuple[str, int]] = (),
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
    submesh_of = {s.name: s.submesh for s in layout.segments}
    previous_segment = {
        link.target: link.source for link in segment_links(layout) if link.edge is None
    }
    arrived_s: dict[tuple[str, str, int], float] = {}  # by submesh or link, sender and group
    for e in trace.events:
        if e.direction in (FORWARD, SEND):
            arrived_s.setdefault((e.submesh, e.segment, e.group), e.end_s)
    byte_changes: dict[str, dict[float, float]] = {m.name: {0.0: 0.0} for m in layout.submeshes}
    event_of_task = {(e.segment, e.group, e.direction): e for e in trace.events}
    for name, group in dict.fromkeys((e.segment, e.group) for e in trace.events):
        events = [
            event_of_task[k]
            for d in (FORWARD, BACKWARD)
            if (k := (name, group, d)) in event_of_task
        ]
        bytes_by_shape = (
            table.second_group_bytes if (name, group) in second_remat else table.group_bytes
        )
        n_bytes = bytes_by_shape.get((name, shapes[group]), 0.0) if group in shapes else 0.0
        if not events or not n_bytes:
            continue
        submesh, sender = submesh_of[name], previous_segment.get(name, "")
        sent_s = arrived_s.get((submesh_of.get(sender, ""), sender, group), events[0].start_s)
        first_s = arrived_s.get((f"{submesh_of.get(sender)} → {submesh}", sender, group), sent_s)
        for time_s, added_bytes in ((first_s, n_bytes), (events[-1].end_s, -n_bytes)):
            byte_changes[submesh][time_s] = byte_changes[submesh].get(time_s, 0.0) + added_bytes
    return {
        name: _step_function(change, table.constant_bytes.get(name, 0.0), trace.makespan_s)
        for name, change in byte_changes.items()
    }


def memory_of_trace(
    layout: Layout, profile: ModelProfile, trace: Trace, shapes_by_name: Mapping[int, str]
) -> dict[str, StepFunction]:
    """`memory_over_time` of a saved trace, whose groups are known as "module:ROWSxTOKENS", with
    " +SEGMENT" for each that runs them under its second recompute policy.

    Raises:
      ValueError: a group's shape is not known, or the profile is not of this plan.
    """
    shape_by_name = {
        f"{m}:{shape.name}": shape for m in layout.modules for shape in layout.shapes(m)
    }
    groups = {e.group for e in trace.events if e.group >= 0}
    words_by_group = {g: shapes_by_name.get(g, "").split(" +") for g in groups}
    if any(name not in shape_by_name for name, *_ in words_by_group.values()):
        raise ValueError("the trace does not name a shape of the plan for every group")
    if {e.segment for e in trace.events} - {s.name for s in layout.segments}:
        raise ValueError("the trace is of another plan")
    shapes = {g: shape_by_name[name] for g, (name, *_) in words_by_group.items()}
    second_remat = {
        (segment, g) for g, (_, *segments) in words_by_group.items() for segment in segments
    }
    return memory_over_time(layout, trace, shapes, byte_table(layout, profile), second_remat)


def _step_function(changes: Mapping[float, float], start: float, end_s: float) -> StepFunction:
    points: list[tuple[float, float]] = []
    residual_bytes = 0.0
    for time_s in sorted(changes):
        residual_bytes += changes[time_s]
        points.append((time_s, start + max(0.0, residual_bytes)))
    return (*points, (end_s, points[-1][1])) if points[-1][0] < end_s else tuple(points)
