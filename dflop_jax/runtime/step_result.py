"""Results of a dispatched step: sums of losses, and the times of its tasks on every process."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dflop_jax.records import BACKWARD, FORWARD, NO_GROUP, Event, Task, Trace
from dflop_jax.runtime.step import Outputs, StepCall
from dflop_jax.simulate.task_graph import StepGraph

# A task's times: when it was dispatched, when its exchanged inputs had arrived, when its own
# program ended, and when its outputs were exchanged.
DISPATCHED, RECEIVED, COMPUTED, END = range(4)
WaitsFor = Mapping[Task, Sequence[Task]]


@dataclass(frozen=True, eq=False)
class StepResult:
    """Sums over the batch by f"{module}.{name}" (such as "MODULE.loss_sum"), the global gradient
    norm and the trace.

    Attributes:
      process_s: compute seconds of each process, if there are several; see `process_seconds`.
      applied: whether parameters were updated: the norm is finite and not above `norm_limit`.
      not_finite: modules with gradients that are not finite, in the order of backward.
    """

    sums: dict[str, float]
    grad_norm: float
    trace: Trace
    started_s: float
    ended_s: float
    process_s: dict[int, float]
    applied: bool = True
    not_finite: tuple[str, ...] = ()


@dataclass(frozen=True)
class LocalResult:
    """One process's results of a step: the four `moments` of each task on its devices by task
    index, in seconds of process 0's clock; `sums` over its part of the batch; gradients' sums of
    `squares` by segment, and their total over all segments (None: unknown)."""

    moments: dict[int, list[float]]
    sums: dict[str, float]
    squares: dict[str, float]
    total_squares: float | None


@dataclass(frozen=True, eq=False)
class StepHandle:
    """A dispatched step; `local_result` and `result` wait for it.

    Attributes:
      observations: this process's tasks by their index in `tasks`.
      free_s: by resource, when its last task ended; `result` updates it.
    """

    step: int
    call: StepCall
    graph: StepGraph
    tasks: Sequence[Task]
    observations: Mapping[int, Observation]
    free_s: dict[int, float]

    def local_result(self, offset_s: float = 0.0) -> LocalResult:
        """Wait for this process's part of the step; `offset_s` is added to its times.

        Raises:
          RuntimeError: the backend failed while running a task.
        """
        for o in self.observations.values():
            o.wait()
        sums = _sum_by_name(
            {k: _local_sum(v) for k, v in group.items()} for group in self.call.sums
        )
        squares = {
            name: float(of_segment.addressable_data(0))
            for name, (_, of_segment) in self.call.reduced.items()
            if of_segment.addressable_shards
        }
        totals = [float(t.addressable_data(0)) for t in self.call.totals if t.addressable_shards]
        moments = {i: [s + offset_s for s in o.moments] for i, o in self.observations.items()}
        return LocalResult(moments, sums, squares, totals[0] if totals else None)

    def result(self, local_results: Sequence[LocalResult] | None = None) -> StepResult:
        """Return the result from all processes' results; by default from this one's alone."""
        local_results = [self.local_result()] if local_results is None else local_results
        programs, waits_for = self.call.programs, self.graph.waits_for
        moments = stack_moments([local.moments for local in local_results], len(self.tasks))
        # A task on several processes starts when the last of them has dispatched it.
        latest_s = dict(zip(self.tasks, moments.max(axis=0).tolist(), strict=True))
        origin, events = to_events(
            latest_s, waits_for, programs.resource_of, programs.submesh_of, self.free_s
        )
        process_s = {}
        if len(local_results) > 1:
            process_s = process_seconds(moments, self.tasks, waits_for, programs.resource_of)
        trace = Trace(self.step, "measured", events)
        squares = {name: value for local in local_results for name, value in local.squares.items()}
        not_finite = dict.fromkeys(
            segment.plan.module
            for name, segment in reversed(programs.segments.items())
            if not math.isfinite(squares.get(name, 0.0))
        )
        totals = (local.total_squares for local in local_results)
        total = next((t for t in totals if t is not None), 0.0)
        return StepResult(
            _sum_by_name(local.sums for local in local_results),
            math.sqrt(total),
            trace,
            origin,
            origin + trace.makespan_s,
            process_s,
            applied=bool(total <= self.call.limit),
            not_finite=tuple(not_finite),
        )


def _local_sum(array: jax.Array) -> float:
    """Sum one replica of each shard, so that the sums of all processes add up."""
    pieces = (s.data for s in array.addressable_shards if s.replica_id == 0)
    return sum(float(np.asarray(piece, np.float64).sum()) for piece in pieces)


def _sum_by_name(terms: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for term in terms:
        for k, v in term.items():
            sums[k] = sums.get(k, 0.0) + v
    return sums


def stack_moments(
    moments_by_process: Sequence[Mapping[int, Sequence[float]]], n_tasks: int
) -> np.ndarray:
    """Return all processes' times, float64 [processes, tasks, moments]; -inf: did not run there."""
    moments = np.full((len(moments_by_process), n_tasks, END + 1), -np.inf)
    for of_process, of_tasks in zip(moments, moments_by_process, strict=True):
        if of_tasks:
            of_process[[*of_tasks]] = [*of_tasks.values()]
    return moments


def to_events(
    moments: Mapping[Task, Sequence[float]],
    waits_for: WaitsFor,
    resource_of: Mapping[str, int],
    submesh_of: Mapping[str, str],
    free_s: dict[int, float],
) -> tuple[float, tuple[Event, ...]]:
    """Return (start of the step, events relative to it), from the times of the tasks in order.

    A task starts when it was dispatched, its inputs were computed and its resource was free.
    `free_s` (resource -> end of its last task) is updated in place; `resource_of` and `submesh_of`
    are by segment.
    """
    spans_s: dict[Task, tuple[float, float]] = {}
    for task, (dispatched_s, *_, end_s) in moments.items():
        resource = resource_of[task.segment]
        inputs_s = [moments[t][END] for t in waits_for[task]]
        start_s = max(dispatched_s, free_s.get(resource, 0.0), *inputs_s, 0.0)
        spans_s[task] = min(start_s, end_s), end_s
        free_s[resource] = end_s
    origin = min((start_s for start_s, _ in spans_s.values()), default=0.0)
    events = tuple(
        Event(submesh_of[t.segment], t.segment, t.group, t.direction, s - origin, e - origin)
        for t, (s, e) in spans_s.items()
    )
    return origin, events


def process_seconds(
    moments: np.ndarray, tasks: Sequence[Task], waits_for: WaitsFor, resource_of: Mapping[str, int]
) -> dict[int, float]:
    """Return the seconds that each process computed in a step, without waiting for others, from all
    processes' times in one clock (`stack_moments`). It leaves out a resource's first task, which
    may have waited for the previous step, and the step's end, where ranks meet inside programs."""
    ends = moments[:, :, END]
    # A task of other processes has ended when it has ended on all of them.
    available_s = np.where(np.isfinite(ends), ends, ends.max(axis=0, initial=-np.inf))
    available_of = dict(zip(tasks, available_s.T, strict=True))
    seconds = np.zeros(len(moments))
    free_s: dict[int, np.ndarray] = {}  # by resource, the end of each process's last task there
    for i, task in enumerate(tasks):
        resource = resource_of[task.segment]
        free = free_s.get(resource, np.full(len(moments), -np.inf))
        ran = np.isfinite(ends[:, i])
        if task.direction in (FORWARD, BACKWARD):
            inputs = [available_of[t] for t in waits_for[task]]
            start = np.maximum.reduce(
                [moments[:, i, DISPATCHED], moments[:, i, RECEIVED], free, *inputs]
            )
            is_timed = ran & np.isfinite(free)
            seconds[is_timed] += np.maximum(moments[is_timed, i, COMPUTED] - start[is_timed], 0.0)
        free_s[resource] = np.where(ran, ends[:, i], free)
    return dict(enumerate(seconds.tolist()))


# ---- observation of dispatched tasks ----


class Watcher:
    """One thread per resource that waits for its tasks' outputs in order and records times."""

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


class Observation:
    """Times of a task's dispatch and of its `Outputs`, in seconds of `perf_counter`."""

    def __init__(self, dispatched_s: float):
        self.moments = [dispatched_s, 0.0, 0.0, 0.0]
        self.error: Exception | None = None
        self.done = threading.Event()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class PendingTasks:
    """Progress of up to two dispatched steps; one thread writes, any thread reads."""

    def __init__(self) -> None:
        # Step number, its tasks, and the observations of this process's tasks by index.
        self._calls: deque[tuple[int, Sequence[Task], Mapping[int, Observation]]] = deque(maxlen=2)
        self._number = 0
        self.n_started = 0  # tasks of the newest step

    def dispatch(self, order: Sequence[Task], observations: Mapping[int, Observation]) -> None:
        """Begin a step; `observations` is filled as its tasks are dispatched."""
        self._number, self.n_started = self._number + 1, 0
        self._calls.append((self._number, order, observations))

    def progress(self) -> tuple[int, int, int, tuple[str, ...]]:
        """Return the fields of `distributed.hang_watch.TaskProgress`: the number of the first step
        with a pending task, its numbers of ended and of started tasks, and descriptions of the last
        ones, the pending one last."""
        calls = tuple(self._calls)
        for number, order, observations in calls:
            is_newest = number == calls[-1][0]
            n_started = self.n_started if is_newest else len(order)
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
    """Describe the last task that ended, the last that started, and the first that is pending."""

    def describe(status: str, i: int) -> str:
        task = order[i]
        group = "" if task.group == NO_GROUP else f", group {task.group}"
        where = f"(task {i + 1} of {len(order)})"
        return f"{status}: {task.direction} of {task.segment}{group} {where}"

    lines = [describe("ended", n_done - 1)] if n_done else []
    lines += [describe("begun", n_started - 1)] if n_done < n_started - 1 else []
    lines += [describe("begun, not ended", n_done)] if n_done < n_started else []
    return tuple(lines)
