"""Observes when dispatched tasks finish, without stopping the dispatch of others."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax

from dflop_jax.records import Event, Task


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
                jax.block_until_ready(outputs)
            except Exception as e:  # handed over to whoever asks for the result
                record.error = e
            record.end_s = time.perf_counter()
            record.done.set()

    def watch(self, resource: int, task: Task, dispatched_s: float, outputs: Any) -> Observation:
        """Note when `outputs` are ready (they must not be donated onwards)."""
        record = Observation(task, dispatched_s)
        self._queues[resource].put((record, outputs))
        return record

    def close(self) -> None:
        for q in self._queues.values():
            q.put(None)
        for t in self._threads:
            t.join(timeout=10)


class Observation:
    """Dispatch and end of one task, in `time.perf_counter` seconds."""

    def __init__(self, task: Task, dispatched_s: float):
        self.task, self.dispatched_s = task, dispatched_s
        self.end_s = 0.0
        self.error: Exception | None = None
        self.done = threading.Event()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


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
    parts: Sequence[Sequence[tuple[int, float, float]]],
    resource_of: dict[str, int],
    waits_for: dict[Task, tuple[Task, ...]],
) -> tuple[dict[Task, float], ...]:
    """What every process took for its tasks of a step, from (place in the order, dispatched, ended)
    of each in one clock. A resource's first task is left out: it may have waited for the step
    before."""
    last_end: dict[Task, float] = {}
    for spans in parts:
        for i, _, end_s in spans:
            last_end[order[i]] = max(end_s, last_end.get(order[i], end_s))
    found = []
    for spans in parts:
        own_end = {order[i]: end_s for i, _, end_s in spans}
        took: dict[Task, float] = {}
        free_s: dict[int, float] = {}
        for i, dispatched_s, end_s in spans:
            task = order[i]
            resource = resource_of[task.segment]
            if resource in free_s:
                inputs = [own_end.get(t, last_end[t]) for t in waits_for[task]]
                start_s = max(dispatched_s, free_s[resource], *inputs)
                took[task] = max(end_s - start_s, 0.0)
            free_s[resource] = end_s
        found.append(took)
    return tuple(found)
