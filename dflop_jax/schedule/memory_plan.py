"""Which groups keep more from forward to backward than their segment's recompute policy says: a
step's memory plan (DIP, arXiv 2504.14145).

A segment with a second recompute policy may run any of its groups under it: backward then takes
less time, and the group takes more memory in between. An order of tasks says which groups a device
holds at every moment, and so what is left. Of the groups that may keep more those are chosen,
device by device, that save most time in all: by a MILP, or greedily where that saves as much.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflop_jax.records import BACKWARD, FORWARD, Plan, Prices, ProgramId, Schedule, Task
from dflop_jax.schedule.balance_problem import ROUNDING, Budget
from dflop_jax.simulate.steps import makespan_by
from dflop_jax.simulate.task_graph import in_flight_limit, resources, step_graph

_GRAIN_BYTES = 2.0**16  # needs are rounded up to it, room down: twice as much wastes twice as much
_TICKS_OF_MOST = 1e6  # whole units that the most seconds saved are rounded to
_MAX_VARIABLES = 2_000  # groups of a device up to which a MILP is solved; else greedy alone
_VARIABLE_WORK = 2  # units of work for each of them, measured
_MAX_NODES = 50  # of a device's branch and bound, which then ends with the best answer so far


@dataclass(frozen=True)
class KeepingGroup:
    """A group of a segment that may keep more: what it then saves, and takes while it is held, at
    the moments [first, stop)."""

    segment: str
    group: int
    saved_s: float
    more_bytes: float
    first: int
    stop: int


@dataclass(frozen=True)
class DeviceRoom:
    """The items of one resource, and the bytes that are free for them at each moment."""

    items: tuple[KeepingGroup, ...]
    room_bytes: tuple[float, ...]

    def saved_s(self, chosen: Sequence[int]) -> float:
        return sum(self.items[i].saved_s for i in chosen)


def with_memory_plan(
    plan: Plan, schedule: Schedule, prices: Prices, trainable: Collection[str], budget: Budget
) -> Schedule:
    """The schedule with the groups that keep more, and its makespan in the same order; as it is
    where no segment has a second policy or nothing is gained."""
    if not plan.scheduling.kept:
        return schedule
    keeping: dict[int, list[str]] = {}
    for device in devices_of(plan, schedule, prices):
        for i in chosen(device, budget):
            keeping.setdefault(device.items[i].group, []).append(device.items[i].segment)
    if not keeping:
        return schedule
    groups = tuple(
        replace(g, remat_less=tuple(keeping.get(i, ()))) for i, g in enumerate(schedule.groups)
    )
    planned = replace(schedule, groups=groups)
    graph = step_graph(plan.layout, groups, trainable)
    order = [graph.place[t] for t in schedule.order]
    makespan_s = makespan_by(plan, planned, graph, prices)(order)
    if makespan_s >= schedule.makespan_s * (1 - ROUNDING):
        return schedule
    return replace(planned, makespan_s=makespan_s)


def devices_of(plan: Plan, schedule: Schedule, prices: Prices) -> list[DeviceRoom]:
    """What every resource with anything to choose may keep more of, in the schedule's order.

    The moments are those at which a resource holds most: the last forward before a backward. Beside
    the groups that it holds then, a segment is taken to hold the input of one more, which waits.
    """
    usual_bytes = {(k.segment, k.shape): k.n_bytes for k in plan.scheduling.kept}
    more_bytes = {(k.segment, k.shape): k.more_bytes for k in plan.scheduling.kept}
    largest: dict[str, float] = {}
    for k in plan.scheduling.kept:
        largest[k.segment] = max(largest.get(k.segment, 0.0), k.n_bytes)
    both = _forward_and_backward(schedule.order)
    limit = in_flight_limit(plan)
    reserved = {n: limit[n] * n_bytes for n, n_bytes in largest.items()}
    of = resources(plan.layout)
    devices = []
    for r in sorted(set(of.values())):
        names = {
            s.name: s for s in plan.layout.segments if of[s.submesh] == r and s.name in largest
        }
        if all(s.remat_less is None for s in names.values()):
            continue
        free = min(plan.scheduling.free_bytes.get(s.submesh, 0.0) for s in names.values())
        tasks = [t for t in schedule.order if t.segment in names and (t.segment, t.group) in both]
        held = dict.fromkeys(names, 0.0)
        begun: dict[tuple[str, int], int] = {}
        items: list[KeepingGroup] = []
        room: list[float] = []
        opened = False
        for t in tasks:
            group, key = schedule.groups[t.group], (t.segment, t.group)
            n_bytes = usual_bytes[t.segment, group.shape]
            if t.direction == FORWARD:
                held[t.segment] += n_bytes
                begun[key] = len(room)
                opened = True
                continue
            if opened:
                used = {n: max(held[n], min(held[n] + largest[n], reserved[n])) for n in names}
                room.append(max(0.0, free + sum(reserved[n] - used[n] for n in names)))
                opened = False
            held[t.segment] -= n_bytes
            saved_s = _saved_s(schedule, t, prices)
            if saved_s > 0:
                extra = max(0.0, more_bytes[t.segment, group.shape])
                items.append(KeepingGroup(*key, saved_s, extra, begun[key], len(room)))
        devices.append(DeviceRoom(tuple(items), tuple(room)))
    return devices


def held_bytes(plan: Plan, schedule: Schedule) -> dict[int, float]:
    """Most bytes that groups between forward and backward take at once on each resource, under the
    recompute policies that they run under."""
    by_shape = {(k.segment, k.shape): k for k in plan.scheduling.kept}
    both = _forward_and_backward(schedule.order)
    of = resources(plan.layout)
    where = {s.name: of[s.submesh] for s in plan.layout.segments}
    held = dict.fromkeys(where.values(), 0.0)
    peak_bytes = dict(held)
    for t in schedule.order:
        if (t.segment, t.group) in both:
            group = schedule.groups[t.group]
            here = by_shape[t.segment, group.shape]
            n_bytes = here.n_bytes + here.more_bytes * (t.segment in group.remat_less)
            r = where[t.segment]
            held[r] += n_bytes if t.direction == FORWARD else -n_bytes
            peak_bytes[r] = max(peak_bytes[r], held[r])
    return peak_bytes


def _forward_and_backward(order: Sequence[Task]) -> set[tuple[str, int]]:
    each = [
        {(t.segment, t.group) for t in order if t.direction == direction}
        for direction in (FORWARD, BACKWARD)
    ]
    return each[0] & each[1]


def _saved_s(schedule: Schedule, backward: Task, prices: Prices) -> float:
    """Seconds of both tasks of a group in a segment that its second policy saves."""
    group = schedule.groups[backward.group]
    saved_s = 0.0
    for direction in (FORWARD, BACKWARD):
        usual = ProgramId(backward.segment, group.shape, direction)
        less = replace(usual, remat_less=True)
        if usual not in prices.programs or less not in prices.programs:
            return 0.0
        usual_s, less_s = (prices.programs[p].of(group.content) for p in (usual, less))
        saved_s += usual_s - less_s
    return saved_s


def greedy(device: DeviceRoom) -> list[int]:
    """Items that fit, those first that save most for what they take and how long."""
    room = np.array(device.room_bytes)
    picked = []

    def worth(i: int) -> tuple[float, int]:
        item = device.items[i]
        taken = item.more_bytes * (item.stop - item.first)
        return (-item.saved_s / taken if taken else -np.inf), i

    for i in sorted(range(len(device.items)), key=worth):
        item = device.items[i]
        span = slice(item.first, item.stop)
        if (room[span] >= item.more_bytes).all():
            room[span] -= item.more_bytes
            picked.append(i)
    return sorted(picked)


def chosen(device: DeviceRoom, budget: Budget) -> list[int]:
    """The items that save most: the greedy choice, or a MILP's where that is better.

    It has one binary for every item and a row for every moment. Equal choices are told apart by a
    share of a tick, so that the answer is one.
    """
    first, n = greedy(device), len(device.items)
    if len(first) == n or n > _MAX_VARIABLES or budget.done:
        return first
    from scipy.optimize import Bounds, LinearConstraint, milp  # takes half a second to load

    budget.spend(_VARIABLE_WORK * n)
    saved, more_bytes, begun, stop = np.array(
        [(i.saved_s, i.more_bytes, i.first, i.stop) for i in device.items]
    ).T
    ticks = np.rint(saved / saved.max() * _TICKS_OF_MOST) + (n - np.arange(n)) / n**2
    moments = np.arange(len(device.room_bytes))[:, None]
    needs = np.where((begun <= moments) & (moments < stop), np.ceil(more_bytes / _GRAIN_BYTES), 0.0)
    room = np.floor(np.array(device.room_bytes) / _GRAIN_BYTES)
    tight = needs.sum(axis=1) > room
    found = milp(
        -ticks,
        integrality=np.ones(n),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(needs[tight], ub=room[tight]),
        options={"node_limit": _MAX_NODES},
    )
    second = [] if found.x is None else np.flatnonzero(found.x > 0.5).tolist()
    return max(first, second, key=device.saved_s)
