"""Choose a step's memory plan (DIP, arXiv 2504.14145): the groups that keep more residuals from
forward to backward than under their segment's default recompute policy.

A segment with a second recompute policy may run any of its groups under it: the backward takes less
time, and the group's residuals more memory. The order of tasks determines which groups a device
holds at every moment, and thus how much memory is free. On every device, groups are chosen by
seconds saved per byte and moment.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from dflop_jax.records import BACKWARD, FORWARD, Plan, Prices, ProgramId, Schedule, Task
from dflop_jax.schedule.balance_problem import ROUNDING
from dflop_jax.simulate.steps import makespan_function
from dflop_jax.simulate.task_graph import (
    in_flight_changes,
    in_flight_limit,
    segment_resources,
    step_graph,
)


@dataclass(frozen=True)
class ResidualItem:
    """A group that may keep `extra_bytes` more in a segment during the moments [first, stop)."""

    segment: str
    group: int
    saved_s: float
    extra_bytes: float
    first: int
    stop: int


@dataclass(frozen=True)
class DeviceMemory:
    """The items of one resource, and the bytes that are free for them at each moment."""

    items: tuple[ResidualItem, ...]
    free_bytes_at: tuple[float, ...]


def with_memory_plan(
    plan: Plan, schedule: Schedule, prices: Prices, trainable: Collection[str]
) -> Schedule:
    """Let groups of a schedule keep more residuals; return it unchanged if that is not faster."""
    if not plan.scheduling.residuals:
        return schedule
    remat_less: dict[int, list[str]] = {}
    for device in device_memories(plan, schedule, prices):
        for i in choose_items(device):
            remat_less.setdefault(device.items[i].group, []).append(device.items[i].segment)
    if not remat_less:
        return schedule
    groups = tuple(
        replace(g, remat_less=tuple(remat_less.get(i, ()))) for i, g in enumerate(schedule.groups)
    )
    planned = replace(schedule, groups=groups)
    graph = step_graph(plan.layout, groups, trainable)
    order = [graph.task_index[t] for t in schedule.order]
    makespan_s = makespan_function(plan, planned, graph, prices)(order)
    if makespan_s >= schedule.makespan_s * (1 - ROUNDING):
        return schedule
    return replace(planned, makespan_s=makespan_s)


def device_memories(plan: Plan, schedule: Schedule, prices: Prices) -> list[DeviceMemory]:
    """Return items and free bytes, in the schedule's order, of every resource on which a segment
    has a second policy.

    Moments are the local maxima of a resource's memory: the last forward before a backward. Each
    segment is assumed to hold the input of one more, waiting group.
    """
    residuals = {(k.segment, k.shape): k for k in plan.scheduling.residuals}
    largest: dict[str, float] = {}
    for k in plan.scheduling.residuals:
        largest[k.segment] = max(largest.get(k.segment, 0.0), k.n_bytes)
    limit, resource = in_flight_limit(plan), segment_resources(plan.layout)
    reserved = {n: limit[n] * n_bytes for n, n_bytes in largest.items()}
    changes = in_flight_changes(schedule.order)
    devices = []
    for r in sorted(set(resource.values())):
        segments = [s for s in plan.layout.segments if resource[s.name] == r and s.name in largest]
        if all(s.remat_less is None for s in segments):
            continue
        free = min(plan.scheduling.free_bytes.get(s.submesh, 0.0) for s in segments)
        live = dict.fromkeys((s.name for s in segments), 0.0)
        start: dict[tuple[str, int], int] = {}
        items: list[ResidualItem] = []
        free_bytes: list[float] = []
        after_forward = False
        for t, change in zip(schedule.order, changes, strict=True):
            if t.segment not in live or not change:
                continue
            key = t.segment, t.group
            residual = residuals[t.segment, schedule.groups[t.group].shape]
            if change > 0:
                live[t.segment] += residual.n_bytes
                start[key] = len(free_bytes)
                after_forward = True
                continue
            if after_forward:
                used = {n: max(b, min(b + largest[n], reserved[n])) for n, b in live.items()}
                free_bytes.append(max(0.0, free + sum(reserved[n] - used[n] for n in live)))
                after_forward = False
            live[t.segment] -= residual.n_bytes
            saved_s = _saved_s(schedule, t, prices)
            if saved_s > 0:
                extra = max(0.0, residual.more_bytes)
                items.append(ResidualItem(*key, saved_s, extra, start[key], len(free_bytes)))
        devices.append(DeviceMemory(tuple(items), tuple(free_bytes)))
    return devices


def peak_residual_bytes(plan: Plan, schedule: Schedule) -> dict[int, float]:
    """Return the peak bytes of residuals on each resource under the groups' recompute policies."""
    residuals = {(k.segment, k.shape): k for k in plan.scheduling.residuals}
    resource = segment_resources(plan.layout)
    live = dict.fromkeys(resource.values(), 0.0)
    peak_bytes = dict(live)
    for t, change in zip(schedule.order, in_flight_changes(schedule.order), strict=True):
        if change:
            group, r = schedule.groups[t.group], resource[t.segment]
            k = residuals[t.segment, group.shape]
            live[r] += change * (k.n_bytes + k.more_bytes * (t.segment in group.remat_less))
            peak_bytes[r] = max(peak_bytes[r], live[r])
    return peak_bytes


def _saved_s(schedule: Schedule, backward: Task, prices: Prices) -> float:
    """Return the seconds that a segment's second policy saves in both tasks of a group."""
    group = schedule.groups[backward.group]
    saved_s = 0.0
    for direction in (FORWARD, BACKWARD):
        usual = ProgramId(backward.segment, group.shape, direction)
        less = replace(usual, remat_less=True)
        if usual not in prices.programs or less not in prices.programs:
            return 0.0
        usual_s, less_s = (prices.programs[p].seconds(group.content) for p in (usual, less))
        saved_s += usual_s - less_s
    return saved_s


def choose_items(device: DeviceMemory) -> list[int]:
    """Choose items greedily by seconds saved per byte and moment; return their indices."""
    free_bytes = np.array(device.free_bytes_at)
    items = []

    def worth(i: int) -> tuple[float, int]:
        item = device.items[i]
        byte_moments = item.extra_bytes * (item.stop - item.first)
        return (-item.saved_s / byte_moments if byte_moments else -np.inf), i

    for i in sorted(range(len(device.items)), key=worth):
        item = device.items[i]
        span = slice(item.first, item.stop)
        if (free_bytes[span] >= item.extra_bytes).all():
            free_bytes[span] -= item.extra_bytes
            items.append(i)
    return sorted(items)
