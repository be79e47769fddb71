"""Results of a dispatched step: sums of losses, and when its tasks ran on every process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflop_jax.records import BACKWARD, FORWARD, Event, Task, Trace
from dflop_jax.runtime.step import StepCall
from dflop_jax.runtime.watcher import Observation
from dflop_jax.simulate.task_graph import StepGraph

# A task's moments: when it was dispatched, when its exchanged inputs had arrived, when its own
# program ended, and when its outputs were exchanged.
DISPATCHED, RECEIVED, COMPUTED, END = range(4)


@dataclass(frozen=True)
class TaskOrder:
    """The tasks of a step in their order; for each the indices of the tasks that it waits for, and
    its resource."""

    tasks: tuple[Task, ...]
    waits_for: list[list[int]]
    resources: list[int]

    @classmethod
    def from_tasks(
        cls,
        tasks: Sequence[Task],
        waits_for: Mapping[Task, Sequence[Task]],
        resource_of: Mapping[str, int],
    ) -> TaskOrder:
        """`resource_of` is by segment."""
        index_of = {task: i for i, task in enumerate(tasks)}
        return cls(
            tuple(tasks),
            [[index_of[t] for t in waits_for[task]] for task in tasks],
            [resource_of[task.segment] for task in tasks],
        )


@dataclass(frozen=True, eq=False)
class StepResult:
    """Sums over the batch by f"{module}.{name}" (as "MODULE.loss_sum"), the global gradient norm,
    and the trace.

    Attributes:
      task_moments: see `stack_moments`.
      applied: whether parameters were updated: the norm is finite and not above `norm_limit`.
      not_finite: modules with gradients that are not finite, in the order of backward.
    """

    sums: dict[str, float]
    grad_norm: float
    trace: Trace
    started_s: float
    ended_s: float
    task_moments: np.ndarray
    applied: bool = True
    not_finite: tuple[str, ...] = ()


@dataclass(frozen=True)
class LocalResult:
    """One process's results of a step: the four moments of each task on its devices by the task's
    index, in seconds of process 0's clock; sums over its part of the batch; sums of squares of the
    gradients of the segments on its devices, and of all segments (None: unknown here)."""

    moments: dict[int, list[float]]
    sums: dict[str, float]
    squares: dict[str, float]
    total_squares: float | None


@dataclass(frozen=True, eq=False)
class StepHandle:
    """A dispatched step; `local` and `result` wait for it.

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

    @cached_property
    def order(self) -> TaskOrder:
        """The step's tasks."""
        return TaskOrder.from_tasks(
            self.tasks, self.graph.waits_for, self.call.programs.resource_of
        )

    def local_result(self, offset_s: float = 0.0) -> LocalResult:
        """Wait for this process's part of the step; `offset_s` is added to its times.

        Raises:
          RuntimeError: the backend failed while running a task.
        """
        for o in self.observations.values():
            o.wait()
        # One of the replicas of each piece, so that the processes' sums add up.
        sums = _sum_by_name(
            {
                k: sum(
                    float(np.asarray(s.data, np.float64).sum())
                    for s in v.addressable_shards
                    if s.replica_id == 0
                )
                for k, v in group.items()
            }
            for group in self.call.sums
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
        """The whole step from the results of all processes; from this process's alone by
        default."""
        local_results = [self.local_result()] if local_results is None else local_results
        task_moments = stack_moments([local.moments for local in local_results], len(self.tasks))
        # A task over several processes begins with the last to dispatch it.
        latest_s = task_moments.max(axis=0)
        origin, events = to_events(
            self.order,
            latest_s[:, DISPATCHED].tolist(),
            latest_s[:, END].tolist(),
            self.call.programs.submesh_of,
            self.free_s,
        )
        trace = Trace(self.step, "measured", events)
        squares = {name: value for local in local_results for name, value in local.squares.items()}
        not_finite = dict.fromkeys(
            segment.plan.module
            for name, segment in reversed(self.call.programs.segments.items())
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
            task_moments,
            applied=bool(total <= self.call.limit),
            not_finite=tuple(not_finite),
        )

    def process_seconds(self, result: StepResult) -> dict[int, float]:
        """The seconds that each process computed (see the function)."""
        return process_seconds(result.task_moments, self.order)


def _sum_by_name(terms: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums by name over all terms."""
    sums: dict[str, float] = {}
    for term in terms:
        for k, v in term.items():
            sums[k] = sums.get(k, 0.0) + v
    return sums


def stack_moments(
    moments_by_process: Sequence[Mapping[int, Sequence[float]]], n_tasks: int
) -> np.ndarray:
    """`LocalResult.moments` of all processes, float64 [processes, tasks, moments]; -inf for tasks
    that a process did not run."""
    moments = np.full((len(moments_by_process), n_tasks, END + 1), -np.inf)
    for of_process, of_tasks in zip(moments, moments_by_process, strict=True):
        if of_tasks:
            of_process[[*of_tasks]] = [*of_tasks.values()]
    return moments


def to_events(
    order: TaskOrder,
    dispatched_s: Sequence[float],
    end_s: Sequence[float],
    submesh_of: Mapping[str, str],
    free_s: dict[int, float],
) -> tuple[float, tuple[Event, ...]]:
    """(start of the step, events relative to it), from when tasks were dispatched and ended.

    A task starts when it was dispatched, its inputs were computed and its resource was free,
    whichever came last. `free_s` (resource -> end of its last task) is updated in place.
    """
    starts_s: list[float] = []
    for resource, inputs, dispatched, end in zip(
        order.resources, order.waits_for, dispatched_s, end_s, strict=True
    ):
        start = max(dispatched, free_s.get(resource, 0.0), *[end_s[i] for i in inputs], 0.0)
        starts_s.append(min(start, end))
        free_s[resource] = end
    origin = min(starts_s, default=0.0)
    events = tuple(
        Event(submesh_of[t.segment], t.segment, t.group, t.direction, s - origin, e - origin)
        for t, s, e in zip(order.tasks, starts_s, end_s, strict=True)
    )
    return origin, events


def process_seconds(moments: np.ndarray, order: TaskOrder) -> dict[int, float]:
    """The seconds that each process computed in a step, without waiting for others, from what each
    saw in one clock (`stack_moments`). Left out are a resource's first task, which may have waited
    for the step before, and the step's end, where ranks meet inside programs."""
    ends = moments[:, :, END]
    # A task that another process ran has ended when the last of them saw it.
    available_s = np.where(np.isfinite(ends), ends, ends.max(axis=0, initial=-np.inf))
    seconds = np.zeros(len(moments))
    free_s: dict[int, np.ndarray] = {}  # by resource, the end of each process's last task there
    for i, task in enumerate(order.tasks):
        free = free_s.get(order.resources[i], np.full(len(moments), -np.inf))
        ran = np.isfinite(ends[:, i])
        if task.direction in (FORWARD, BACKWARD):
            inputs = [available_s[:, index] for index in order.waits_for[i]]
            start = np.maximum.reduce(
                [moments[:, i, DISPATCHED], moments[:, i, RECEIVED], free, *inputs]
            )
            is_timed = ran & np.isfinite(free)
            seconds[is_timed] += np.maximum(moments[is_timed, i, COMPUTED] - start[is_timed], 0.0)
        free_s[order.resources[i]] = np.where(ran, ends[:, i], free)
    return dict(enumerate(seconds.tolist()))
