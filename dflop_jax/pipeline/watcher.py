"""Observes when dispatched tasks finish, without stopping the dispatch of others.

What a task does on devices of its own is told from what it does together with the ranks of other
processes: features and gradients that are exchanged arrive when the slowest rank has sent them.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any, NamedTuple

import jax

from dflop_jax.records import Task


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

    @property
    def moments(self) -> tuple[float, float, float, float]:
        """The moments, as `task_times.Spans` has them."""
        return self.dispatched_s, self.received_s, self.computed_s, self.end_s
