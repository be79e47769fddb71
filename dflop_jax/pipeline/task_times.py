"""When the tasks of a step ran, as every process saw them, for thousands of processes at once.

Processes that ran the same tasks (the data ranks of a segment) are rows of one array, so that the
work in Python is by task, not by task and process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dflop_jax.records import BACKWARD, FORWARD, Event, Task

# Of a task's times: when it was dispatched, when what is exchanged for it was there, when its own
# program ended, and when what it sends was exchanged.
DISPATCHED, RECEIVED, COMPUTED, END = range(4)
_MOMENTS = END + 1


class Spans(NamedTuple):
    """What a process saw of its n tasks of a step, in the order in which it dispatched them.

    places: int32 [n] as bytes, of the tasks in the step's order.
    moments: float64 [n, 4] as bytes, seconds of process 0's clock.
    """

    places: bytes = b""
    moments: bytes = b""

    @classmethod
    def of(cls, seen: Mapping[int, Sequence[float]], offset_s: float = 0.0) -> Spans:
        """The spans from the four moments of each task by its place, in a clock that lacks
        `offset_s` to process 0's."""
        moments = np.array([*seen.values()], np.float64) + offset_s
        return cls(np.array([*seen], np.int32).tobytes(), moments.tobytes())


@dataclass(frozen=True, eq=False)
class TaskTimes:
    """The moments of the tasks that some processes ran, all of these the same ones.

    places: int [tasks], of the tasks in the step's order, as the processes dispatched them.
    times: float64 [processes, moments, tasks].
    """

    processes: tuple[int, ...]
    places: np.ndarray
    times: np.ndarray


@dataclass(frozen=True)
class TaskOrder:
    """The tasks of a step in their order, and by place in it: the places of the tasks that one
    waits for, and what it keeps busy."""

    tasks: tuple[Task, ...]
    waits_for: list[list[int]]
    resource: list[int]

    @classmethod
    def of(
        cls,
        tasks: Sequence[Task],
        waits_for: Mapping[Task, Sequence[Task]],
        resource_of: Mapping[str, int],
    ) -> TaskOrder:
        """`resource_of` is by segment."""
        place = {task: i for i, task in enumerate(tasks)}
        return cls(
            tuple(tasks),
            [[place[t] for t in waits_for[task]] for task in tasks],
            [resource_of[task.segment] for task in tasks],
        )


def gathered(parts: Sequence[Spans]) -> list[TaskTimes]:
    """What the processes saw, [processes, moments, tasks]."""
    alike: dict[bytes, list[int]] = {}
    for process, spans in enumerate(parts):
        alike.setdefault(spans.places, []).append(process)
    groups = []
    for encoded, processes in alike.items():
        places = np.frombuffer(encoded, np.int32)
        moments = np.frombuffer(b"".join([parts[p].moments for p in processes]))
        times = moments.reshape(len(processes), len(places), _MOMENTS).transpose(0, 2, 1)
        groups.append(TaskTimes(tuple(processes), places, times))
    return groups


def latest_s(groups: Sequence[TaskTimes], moment: int, n_tasks: int) -> np.ndarray:
    """The latest moment of each place, on whichever process, float64 [n_tasks]; each task is some
    process's."""
    latest = np.full(n_tasks, -np.inf)
    for group in groups:
        here = group.times[:, moment].max(axis=0)
        latest[group.places] = np.maximum(latest[group.places], here)
    return latest


def to_events(
    order: TaskOrder,
    dispatched_s: Sequence[float],
    end_s: Sequence[float],
    submesh_of: Mapping[str, str],
    free_s: dict[int, float],
) -> tuple[float, tuple[Event, ...]]:
    """(start of the step, events relative to it), from when tasks were dispatched and ended.

    A task starts when it was dispatched, its inputs were made and its resource was free,
    whichever came last. `free_s` (resource -> last end, of the previous step) is brought up to
    date in place.
    """
    starts_s: list[float] = []
    for resource, inputs, begun, end in zip(
        order.resource, order.waits_for, dispatched_s, end_s, strict=True
    ):
        start = max(begun, free_s.get(resource, 0.0), *[end_s[i] for i in inputs], 0.0)
        starts_s.append(min(start, end))
        free_s[resource] = end
    origin = min(starts_s, default=0.0)
    events = tuple(
        Event(submesh_of[t.segment], t.segment, t.group, t.direction, s - origin, e - origin)
        for t, s, e in zip(order.tasks, starts_s, end_s, strict=True)
    )
    return origin, events


def process_seconds(groups: Sequence[TaskTimes], order: TaskOrder) -> dict[int, float]:
    """The seconds that each process computed in a step, without waiting for others, from what each
    saw in one clock. Left out are a resource's first task, which may have waited for the step
    before, and the step's end, where ranks meet inside programs."""
    last_end_s = latest_s(groups, END, len(order.tasks)).tolist()
    seconds: dict[int, float] = {}
    for group in groups:
        of_group = _own_seconds(group, order, last_end_s).sum(axis=1).tolist()
        seconds |= zip(group.processes, of_group, strict=True)
    return seconds


def _own_seconds(group: TaskTimes, order: TaskOrder, last_end_s: Sequence[float]) -> np.ndarray:
    """[processes, tasks], of those tasks whose start is known."""
    places = group.places.tolist()
    column = {place: i for i, place in enumerate(places)}
    latest: dict[int, int] = {}  # by resource, the column of its last task so far
    columns: list[int] = []
    after: list[list[int]] = []  # of each, the columns of tasks that end before it begins
    elsewhere_s: list[float] = []  # and the end of those of other processes
    for i, place in enumerate(places):
        resource = order.resource[place]
        if resource in latest and order.tasks[place].direction in (FORWARD, BACKWARD):
            inputs = order.waits_for[place]
            columns.append(i)
            after.append([latest[resource], *[column[p] for p in inputs if p in column]])
            others_s = [last_end_s[p] for p in inputs if p not in column]
            elsewhere_s.append(max(others_s, default=-math.inf))
        latest[resource] = i
    start = np.maximum(group.times[:, DISPATCHED], group.times[:, RECEIVED])
    start = np.maximum(start.take(columns, axis=1), elsewhere_s)
    end = group.times[:, END]
    for k in range(max(map(len, after), default=0)):
        # Who waits for fewer waits for its first once more.
        np.maximum(start, end.take([c[k] if k < len(c) else c[0] for c in after], 1), out=start)
    return np.maximum(group.times[:, COMPUTED].take(columns, axis=1) - start, 0.0)
