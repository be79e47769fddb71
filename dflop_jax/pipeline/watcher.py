"""Observes when dispatched tasks finish, without stopping the dispatch of others.

What a task does on devices of its own is told from what it does together with the ranks of other
processes: features and gradients that are exchanged arrive when the slowest rank has sent them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from dflop_jax.records import BACKWARD, FORWARD, Event, Task


class Watcher:
    """One thread per resource that awaits its tasks' outputs in order and notes the times."""

    def __init__(self, resources: set[int]):
        self._queues: dict[int, queue.Queue[Any]] = {r: queue.Queue() for r in resources}
        self._threads = [
            threading.Thread(target=self._run, args=(q,), daemon=True, name=f"watcher-{r}")
            for r, q in self._queues.items()
        ]
        for t in self._threads:
            t.start()

    @staticmethod
    def _run(q: queue.Queue[Any]) -> None:
        while (item := q.get()) is not None:
            record, outputs = item
            try:
                jax.block_until_ready(outputs.received)
                record.received_s = time.perf_counter()
                jax.block_until_ready(outputs.computed)
                record.computed_s = time.perf_counter()
                jax.block_until_ready(outputs.sent)
            except Exception as e:  # handed over to whoever asks for the result
                record.error = e
            record.end_s = time.perf_counter()
            record.done.set()

    def watch(
        self, resource: int, task: Task, dispatched_s: float, outputs: Outputs
    ) -> Observation:
        """Note when `outputs` are ready."""
        record = Observation(task, dispatched_s)
        self._queues[resource].put((record, outputs))
        return record

    def close(self) -> None:
        for q in self._queues.values():
            q.put(None)
        for t in self._threads:
            t.join(timeout=10)


class Outputs(NamedTuple):
    """Arrays of a task to wait for, which are not donated onwards: of the exchange that brings it
    gradients, of its own program, and of the exchange of what it gives."""

    received: Any
    computed: Any
    sent: Any


class Span(NamedTuple):
    """What a process saw of a task, by its place in the step's order, in seconds of one clock."""

    place: int
    dispatched_s: float
    received_s: float  # what is exchanged for it is there
    computed_s: float  # its own program has ended
    end_s: float  # what it sends is exchanged

    def later(self, by_s: float) -> Span:
        """The same in a clock that is ahead by `by_s`."""
        return Span(self.place, *(s + by_s for s in self[1:]))


class Observation:
    """The times of one task, in `time.perf_counter` seconds."""

    def __init__(self, task: Task, dispatched_s: float):
        self.task, self.dispatched_s = task, dispatched_s
        self.received_s = self.computed_s = self.end_s = 0.0
        self.error: Exception | None = None
        self.done = threading.Event()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error

    def span(self, place: int) -> Span:
        return Span(place, self.dispatched_s, self.received_s, self.computed_s, self.end_s)


def to_events(
    seen: Sequence[tuple[Task, float, float]],
    submesh_of: dict[str, str],
    resource_of: dict[str, int],
    waits_for: dict[Task, tuple[Task, ...]],
    free_s: dict[int, float],
) -> tuple[float, tuple[Event, ...]]:
    """(start of the step, events relative to it), from (task, dispatched, ended) in dispatch order.

    A task starts when it was dispatched, its inputs were made and its resource was free,
    whichever came last. `free_s` (resource -> last end, of the previous step) is brought up to
    date in place.
    """
    ends = {task: end_s for task, _, end_s in seen}
    spans: list[tuple[Task, float, float]] = []
    for task, dispatched_s, end_s in seen:
        resource = resource_of[task.segment]
        start = max(
            dispatched_s, free_s.get(resource, 0.0), *(ends[d] for d in waits_for[task]), 0.0
        )
        spans.append((task, min(start, end_s), end_s))
        free_s[resource] = end_s
    origin = min((s for _, s, _ in spans), default=0.0)
    events = tuple(
        Event(submesh_of[t.segment], t.segment, t.group, t.direction, s - origin, e - origin)
        for t, s, e in spans
    )
    return origin, events


def own_seconds(
    order: Sequence[Task],
    parts: Sequence[Sequence[Span]],
    resource_of: dict[str, int],
    waits_for: dict[Task, tuple[Task, ...]],
) -> tuple[dict[Task, float], ...]:
    """What every process computed for its tasks of a step, without waiting for others, from what
    each saw in one clock. Left out are a resource's first task, which may have waited for the step
    before, and the step's end, where ranks meet inside programs."""
    last_end: dict[Task, float] = {}
    for spans in parts:
        for s in spans:
            last_end[order[s.place]] = max(s.end_s, last_end.get(order[s.place], s.end_s))
    found = []
    for spans in parts:
        own_end = {order[s.place]: s.end_s for s in spans}
        took: dict[Task, float] = {}
        free_s: dict[int, float] = {}
        for s in spans:
            task = order[s.place]
            resource = resource_of[task.segment]
            if resource in free_s and task.direction in (FORWARD, BACKWARD):
                inputs = [own_end.get(t, last_end[t]) for t in waits_for[task]]
                start_s = max(s.dispatched_s, s.received_s, free_s[resource], *inputs)
                took[task] = max(s.computed_s - start_s, 0.0)
            free_s[resource] = s.end_s
        found.append(took)
    return tuple(found)
