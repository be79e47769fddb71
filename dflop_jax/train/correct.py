"""Feeds observed task times back into the schedules of later batches, while that pays."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import mean

from dflop_jax.records import BACKWARD, FORWARD, Plan, Prices, ProgramId, Schedule, Trace
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
from dflop_jax.train.feed import ReadyBatch


class Corrector:
    """Adaptive correction of one run (DFLOP, arXiv 2603.25120; our rules are in
    `schedule.correction`).

    Args:
      prices: as predicted.
      trainable: names of the segments that train.
    """

    def __init__(
        self,
        plan: Plan,
        prices: Prices,
        trainable: Sequence[str],
        worker: ScheduleWorker,
        progress: Progress,
    ):
        self._plan, self._prices, self._trainable = plan, prices, trainable
        self._worker, self._progress = worker, progress
        self.state, self.monitor = Correction(), Monitor()
        self._gain_s = self._overhead_s = 0.0

    def restore(self, state: Correction, monitor: Monitor) -> None:
        """Continue from what another run had learnt."""
        self.state, self.monitor = state, monitor
        self._worker.update_prices(corrected(self._prices, state))

    @property
    def report(self) -> dict[str, float]:
        """For the metrics: whether sampling is on, and why."""
        return {
            "sampling": float(self.monitor.on),
            "farthest_factor": 1.0 + self.state.deviation,
            "predicted_gain_s": self._gain_s,
            "overhead_s": self._overhead_s,
        }

    def after_step(self, trace: Trace, batch: ReadyBatch) -> None:
        """Learn from a finished step, if it is one to sample; later batches are scheduled by what
        was learnt. A change of mind about sampling is logged with its reasons."""
        step = batch.step
        if not sampling(self.monitor, step):
            return
        started_s = time.perf_counter()
        observed = task_times(trace, batch.schedule)
        predicted = predicted_s(self._plan, batch.schedule, self._prices)
        self.state = observe(self.state, self._plan, observed, predicted)
        after = corrected(self._prices, self.state)
        gain_s = predicted_gain_s(batch.loads, self._plan, self._prices, after, self._trainable)
        self._worker.update_prices(after)
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


def predicted_s(plan: Plan, schedule: Schedule, prices: Prices) -> dict[ProgramId, float]:
    """Mean predicted seconds of every program over the groups that it runs in a schedule."""
    seconds: dict[ProgramId, list[float]] = {}
    for group in schedule.groups:
        for segment in plan.segments_of(group.module):
            for direction in (FORWARD, BACKWARD):
                program = ProgramId(segment.name, group.shape, direction)
                if price := prices.programs.get(program):
                    seconds.setdefault(program, []).append(price.of(group.pairs))
    return {program: mean(times_s) for program, times_s in seconds.items()}
