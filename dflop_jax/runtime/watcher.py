"""Observes when dispatched tasks finish, without stopping the dispatch of others.

Exchanges are timed apart from a task's own program: exchanged features and gradients arrive when
the slowest rank of all processes has sent them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from dflop_jax.records import NO_GROUP, Task

_MAX_LINES = 3  # described tasks that have ended, and as many that have begun


class Watcher:
    """One thread per resource, which awaits its tasks' outputs in order and records the times."""

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
                for i, arrays in enumerate(outputs, 1):
                    jax.block_until_ready(arrays)
                    record.moments[i] = time.perf_counter()
            except Exception as error:  # raised again by `Observation.wait`
                record.error = error
                record.moments[-1] = time.perf_counter()
            record.done.set()

    def watch(self, resource: int, dispatched_s: float, outputs: Outputs) -> Observation:
        """Record when `outputs` are ready."""
        record = Observation(dispatched_s)
        self._queues[resource].put((record, outputs))
        return record

    def close(self) -> None:
        for q in self._queues.values():
            q.put(None)
        for t in self._threads:
            t.join(timeout=10)


class Outputs(NamedTuple):
    """Arrays of a task that are awaited and never donated: of the exchange that brings its
    gradients, of its own program, and of the exchange of its outputs."""

    received: Any
    computed: Any
    sent: Any


class Observation:
    """The times of one task, in `time.perf_counter` seconds: when it was dispatched, and when each
    of its `Outputs` was there (`step_result.DISPATCHED` and what follows it)."""

    def __init__(self, dispatched_s: float):
        self.moments = [dispatched_s, 0.0, 0.0, 0.0]
        self.error: Exception | None = None
        self.done = threading.Event()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class PendingTasks:
    """The progress of this process in its steps' tasks; one thread writes, any thread reads.

    Up to two steps are pending: a step is dispatched before the previous one is awaited.
    """

    def __init__(self) -> None:
        # Number, tasks, and those of this process that are observed, by their place among them.
        self._calls: deque[tuple[int, Sequence[Task], Mapping[int, Observation]]] = deque(maxlen=2)
        self._number = self._n_started = 0

    def dispatch(self, order: Sequence[Task], observations: Mapping[int, Observation]) -> None:
        """Begin a step; `observations` is filled as its tasks are dispatched."""
        self._number, self._n_started = self._number + 1, 0
        self._calls.append((self._number, order, observations))

    def start_task(self, index: int) -> None:
        """Record that the task at this index is dispatched."""
        self._n_started = index + 1

    def progress(self) -> tuple[int, int, int, tuple[str, ...]]:
        """The number of the first step with a pending task, how many of its first tasks have ended,
        how many have begun, and descriptions of the last ones, the pending one last.
        `distributed.hang_watch.TaskProgress` takes them."""
        calls = tuple(self._calls)
        for number, order, observations in calls:
            is_newest = number == calls[-1][0]
            n_started = self._n_started if is_newest else len(order)
            running = (
                i
                for i in range(n_started)
                if i in observations and not observations[i].done.is_set()
            )
            n_done = next(running, n_started)
            if is_newest or n_done < n_started:
                return number, n_done, n_started, _describe_progress(order, n_done, n_started)
        return 0, 0, 0, ()


def _describe_progress(order: Sequence[Task], n_done: int, n_started: int) -> tuple[str, ...]:
    """Descriptions of the last tasks that ended and began, the pending one last."""
    started = range(max(n_done + 1, n_started - _MAX_LINES), n_started)
    described = [("ended", i) for i in range(max(n_done - _MAX_LINES, 0), n_done)]
    described += [("begun", i) for i in started]
    described += [("begun, not ended", n_done)] if n_done < n_started else []
    return tuple(
        f"{status}: {_describe_task(order[i])} (task {i + 1} of {len(order)})"
        for status, i in described
    )


def _describe_task(task: Task) -> str:
    group = "" if task.group == NO_GROUP else f", group {task.group}"
    return f"{task.direction} of {task.segment}{group}"
