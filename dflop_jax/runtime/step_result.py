"""What comes out of a dispatched step: sums, and when its tasks ran, as every process saw them."""

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

# Of a task's times: when it was dispatched, when what is exchanged for it was there, when its own
# program ended, and when what it sends was exchanged.
DISPATCHED, RECEIVED, COMPUTED, END = range(4)


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


@dataclass(frozen=True, eq=False)
class StepResult:
    """Sums over the batch by f"{module}.{name}" (as "MODULE.loss_sum"), the global gradient norm,
    the trace, and what every process saw.

    Attributes:
      seen: see `moments_of`.
      applied: the parameters were updated; not where the norm is above `norm_limit` or not finite.
      not_finite: modules whose gradients are not, in the order in which backward comes to them.
    """

    sums: dict[str, float]
    grad_norm: float
    trace: Trace
    started_s: float
    ended_s: float
    seen: np.ndarray
    applied: bool = True
    not_finite: tuple[str, ...] = ()


@dataclass(frozen=True)
class LocalResult:
    """One process's part of a step: the four moments of each task on its devices, by the task's
    place in the step's order, in seconds of process 0's clock; sums over its part of the batch;
    sums of squares of the gradients of the segments on its devices, and of all segments, None when
    it does not know."""

    spans: dict[int, list[float]]
    sums: dict[str, float]
    squares: dict[str, float]
    total_squares: float | None


@dataclass(frozen=True, eq=False)
class StepHandle:
    """A dispatched step; `local` and `result` wait for it.

    Attributes:
      seen: this process's tasks by their place among all `tasks`.
      free_s: by resource, when its last task ended; `result` brings it up to date.
    """

    step: int
    call: StepCall
    graph: StepGraph
    tasks: Sequence[Task]
    seen: Mapping[int, Observation]
    free_s: dict[int, float]

    @cached_property
    def order(self) -> TaskOrder:
        """The step's tasks."""
        return TaskOrder.of(self.tasks, self.graph.waits_for, self.call.programs.resource)

    def local(self, offset_s: float = 0.0) -> LocalResult:
        """Wait for this process's part of the step; its times are in the clock that this process's
        lacks `offset_s` to.

        Raises:
          RuntimeError: the backend failed while running a task.
        """
        for o in self.seen.values():
            o.wait()
        # One of the replicas of each piece, so that the processes' sums add up.
        sums = _added(
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
        spans = {i: [s + offset_s for s in o.moments] for i, o in self.seen.items()}
        return LocalResult(spans, sums, squares, totals[0] if totals else None)

    def result(self, parts: Sequence[LocalResult] | None = None) -> StepResult:
        """The whole step, from what every process saw, in one clock; from this one's part alone
        when it is the only process."""
        parts = [self.local()] if parts is None else parts
        seen = moments_of([part.spans for part in parts], len(self.tasks))
        # A task over several processes begins with the last to dispatch it.
        latest_s = seen.max(axis=0)
        origin, events = to_events(
            self.order,
            latest_s[:, DISPATCHED].tolist(),
            latest_s[:, END].tolist(),
            self.call.programs.submesh,
            self.free_s,
        )
        trace = Trace(self.step, "measured", events)
        squares = {name: value for part in parts for name, value in part.squares.items()}
        not_finite = dict.fromkeys(
            segment.plan.module
            for name, segment in reversed(self.call.programs.segments.items())
            if not math.isfinite(squares.get(name, 0.0))
        )
        totals = (part.total_squares for part in parts)
        total = next((t for t in totals if t is not None), 0.0)
        return StepResult(
            _added(part.sums for part in parts),
            math.sqrt(total),
            trace,
            origin,
            origin + trace.makespan_s,
            seen,
            applied=bool(total <= self.call.limit),
            not_finite=tuple(not_finite),
        )

    def process_seconds(self, result: StepResult) -> dict[int, float]:
        """The seconds that each process computed (see the function)."""
        return process_seconds(result.seen, self.order)


def _added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums by name of what each part has by name."""
    sums: dict[str, float] = {}
    for part in parts:
        for k, v in part.items():
            sums[k] = sums.get(k, 0.0) + v
    return sums


def moments_of(parts: Sequence[Mapping[int, Sequence[float]]], n_tasks: int) -> np.ndarray:
    """What the processes saw (`LocalResult.spans`), float64 [processes, tasks, moments]: -inf of
    the tasks that a process did not run."""
    seen = np.full((len(parts), n_tasks, END + 1), -np.inf)
    for of_process, spans in zip(seen, parts, strict=True):
        if spans:
            of_process[[*spans]] = [*spans.values()]
    return seen


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


def process_seconds(seen: np.ndarray, order: TaskOrder) -> dict[int, float]:
    """The seconds that each process computed in a step, without waiting for others, from what each
    saw in one clock (`moments_of`). Left out are a resource's first task, which may have waited for
    the step before, and the step's end, where ranks meet inside programs."""
    ends = seen[:, :, END]
    # A task that another process ran has ended when the last of them saw it.
    made = np.where(np.isfinite(ends), ends, ends.max(axis=0, initial=-np.inf))
    seconds = np.zeros(len(seen))
    free_s: dict[int, np.ndarray] = {}  # by resource, the end of each process's last task there
    for i, task in enumerate(order.tasks):
        free = free_s.get(order.resource[i], np.full(len(seen), -np.inf))
        ran = np.isfinite(ends[:, i])
        if task.direction in (FORWARD, BACKWARD):
            inputs = [made[:, place] for place in order.waits_for[i]]
            start = np.maximum.reduce([seen[:, i, DISPATCHED], seen[:, i, RECEIVED], free, *inputs])
            known = ran & np.isfinite(free)
            seconds[known] += np.maximum(seen[known, i, COMPUTED] - start[known], 0.0)
        free_s[order.resource[i]] = np.where(ran, ends[:, i], free)
    return dict(enumerate(seconds.tolist()))
