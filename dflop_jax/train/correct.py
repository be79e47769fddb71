"""Feeds observed task times back into the schedules of later batches, while that pays."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from dflop_jax.records import Plan, Task, Trace
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
from dflop_jax.train.feed import Batch


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
        self._gain_s = self._overhead_s = 0.0

    def restore(self, state: Correction, monitor: Monitor) -> None:
        """Continue from what another run had learnt."""
        self.state, self.monitor = state, monitor
        now = corrected(self._seconds, self._plan, state)
        self._worker.update_costs(bucket_costs(self._plan, now, self._trainable))

    @property
    def report(self) -> dict[str, float]:
        """For the metrics: whether sampling is on, and why."""
        return {
            "sampling": float(self.monitor.on),
            "farthest_factor": 1.0 + self.state.deviation,
            "predicted_gain_s": self._gain_s,
            "overhead_s": self._overhead_s,
        }

    def after_step(self, trace: Trace, batch: Batch) -> None:
        """Learn from a finished step, if it is one to sample; later batches are scheduled by what
        was learnt. A change of mind about sampling is logged with its reasons."""
        step = batch.step
        if not sampling(self.monitor, step):
            return
        started_s = time.perf_counter()
        buckets = [group[0].bucket for group in batch.schedule.groups]
        self.state = observe(self.state, self._plan, task_times(trace, buckets), self._seconds)
        now = corrected(self._seconds, self._plan, self.state)
        after = bucket_costs(self._plan, now, self._trainable)
        gain_s = predicted_gain_s(batch.shapes, self._plan, self._before, after)
        self._worker.update_costs(after)
        overhead_s = time.perf_counter() - started_s
        was_on = self.monitor.on
        self._gain_s, self._overhead_s = gain_s, overhead_s
        self.monitor = decide(self.monitor, step, self.state, gain_s=gain_s, overhead_s=overhead_s)
        if self.monitor.on != was_on or step == 0:
            self._progress.log(
                f"step {step}: sampling of task times {'on' if self.monitor.on else 'off'}; "
                f"farthest correction {1 + self.state.deviation:.2f}x, predicted gain "
                f"{1e3 * gain_s:.1f} ms a step, overhead {1e3 * overhead_s:.1f} ms"
            )
