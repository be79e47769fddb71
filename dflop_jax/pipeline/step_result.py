"""What comes out of a dispatched step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dflop_jax.pipeline import task_times
from dflop_jax.pipeline.step_call import StepCall
from dflop_jax.pipeline.task_times import Spans, TaskOrder, TaskTimes
from dflop_jax.pipeline.watcher import Observation
from dflop_jax.records import Task, Trace
from dflop_jax.tasks.graph import StepGraph


@dataclass(frozen=True)
class StepResult:
    """Sums over the batch by f"{module}.{name}" (as "MODULE.loss_sum"), the global gradient norm,
    the trace, and what every process saw.

    Attributes:
      applied: the parameters were updated; not where the norm is above `norm_limit` or not finite.
      not_finite: modules whose gradients are not, in the order in which backward comes to them.
    """

    sums: dict[str, float]
    grad_norm: float
    trace: Trace
    started_s: float
    ended_s: float
    seen: list[TaskTimes]
    applied: bool = True
    not_finite: tuple[str, ...] = ()


@dataclass(frozen=True)
class LocalResult:
    """One process's part of a step: the tasks on its devices, in seconds of its
    `time.perf_counter`; sums over its part of the batch; sums of squares of the gradients of the
    segments on its devices, and of all segments, None when it does not know."""

    spans: Spans
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
        call = self.call
        sums: dict[str, float] = {}
        for group in call.under_way.sums:
            for k, v in group.items():
                # One of the replicas of each piece, so that the processes' sums add up.
                held = [s.data for s in v.addressable_shards if s.replica_id == 0]
                total = sum(float(np.asarray(a, np.float64).sum()) for a in held)
                sums[k] = sums.get(k, 0.0) + total
        squares = {
            name: float(of_segment.addressable_data(0))
            for name, (_, of_segment) in call.under_way.reduced.items()
            if of_segment.addressable_shards
        }
        totals = [
            float(t.addressable_data(0)) for t in call.under_way.totals if t.addressable_shards
        ]
        spans = Spans.of({i: o.moments for i, o in self.seen.items()}, offset_s)
        return LocalResult(spans, sums, squares, totals[0] if totals else None)

    def result(self, parts: Sequence[LocalResult] | None = None) -> StepResult:
        """The whole step, from what every process saw, in one clock; from this one's part alone
        when it is the only process."""
        parts = [self.local()] if parts is None else parts
        sums: dict[str, float] = {}
        for part in parts:
            for k, v in part.sums.items():
                sums[k] = sums.get(k, 0.0) + v
        seen = task_times.gathered([part.spans for part in parts])
        n = len(self.tasks)
        # A task over several processes begins with the last to dispatch it.
        dispatched_s = task_times.latest_s(seen, task_times.DISPATCHED, n).tolist()
        end_s = task_times.latest_s(seen, task_times.END, n).tolist()
        submesh_of = self.call.programs.submesh
        origin, events = task_times.to_events(
            self.order, dispatched_s, end_s, submesh_of, self.free_s
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
            sums,
            math.sqrt(total),
            trace,
            origin,
            origin + trace.makespan_s,
            seen,
            applied=bool(total <= self.call.limit),
            not_finite=tuple(not_finite),
        )

    def process_seconds(self, result: StepResult) -> dict[int, float]:
        """The seconds that each process computed (see `task_times.process_seconds`)."""
        return task_times.process_seconds(result.seen, self.order)
