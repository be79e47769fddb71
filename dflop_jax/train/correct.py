"""Feeds observed task times back into the schedules of later batches, while that pays."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from dflop_jax.records import Plan, SampleShape, Schedule, Task, Trace
from dflop_jax.report.progress import Progress
from dflop_jax.schedule.correction import (
    Correction,
    Monitor,
    corrected,
    decide,
    observe,
    predicted_gain_s,
    sampling,
    task_times,
)
from dflop_jax.schedule.worker import ScheduleWorker
from dflop_jax.sim.predict import bucket_costs


class Corrector:
    """Adaptive correction of one run (DFLOP, arXiv 2603.25120; our rules are in
    `schedule.correction`).

    Args:
      seconds: predicted times of (segment, bucket index, direction).
      trainable: names of the segments that train.
    """

    def __init__(
        self,
        plan: Plan,
        seconds: Mapping[Task, float],
        trainable: Sequence[str],
        worker: ScheduleWorker,
        progress: Progress,
    ):
        self._plan, self._seconds, self._trainable = plan, seconds, trainable
        self._worker, self._progress = worker, progress
        self._before = bucket_costs(plan, seconds, trainable)
        self.state, self.monitor = Correction(), Monitor()

    def after_step(
        self, step: int, trace: Trace, schedule: Schedule, shapes: Sequence[SampleShape]
    ) -> None:
        """Learn from a finished step, if it is one to sample; later batches are scheduled by what
        was learnt. A change of mind about sampling is logged with its reasons."""
        if not sampling(self.monitor, step):
            return
        started_s = time.perf_counter()
        buckets = [group[0].bucket for group in schedule.groups]
        self.state = observe(self.state, self._plan, task_times(trace, buckets), self._seconds)
        now = corrected(self._seconds, self._plan, self.state)
        after = bucket_costs(self._plan, now, self._trainable)
        gain_s = predicted_gain_s(shapes, self._plan, self._before, after)
        self._worker.update_costs(after)
        overhead_s = time.perf_counter() - started_s
        was_on = self.monitor.on
        self.monitor = decide(self.monitor, step, self.state, gain_s=gain_s, overhead_s=overhead_s)
        if self.monitor.on != was_on or step == 0:
            self._progress.log(
                f"step {step}: sampling of task times {'on' if self.monitor.on else 'off'}; "
                f"farthest correction {1 + self.state.deviation:.2f}x, predicted gain "
                f"{1e3 * gain_s:.1f} ms a step, overhead {1e3 * overhead_s:.1f} ms"
            )
