"""Feeds observed task times back into the schedules of later batches, while that pays."""

from __future__ import annotations

import time
from collections.abc import Iterator

from dflop_jax.records import Prices, Trace
from dflop_jax.report.row_file import RowFile, read_rows
from dflop_jax.report.run_folder import CORRECTIONS
from dflop_jax.schedule.correction import (
    Correction,
    CorrectionState,
    StepSample,
    add_ratios,
    add_sample,
    correct_prices,
    drop_old_changes,
    expected_times,
    is_full,
    is_sampling,
    learnt_gain_s,
    log_ratios,
    price_digest,
    replay_samples,
    task_times,
    with_decision,
)
from dflop_jax.schedule.worker import ScheduleWorker
from dflop_jax.train.choose_plan import PlannedRun
from dflop_jax.train.feed import PackedBatch

_MIN_SHOWN_GAIN_S = 5e-5  # a gain below it would be printed as 0.0 ms


def read_samples(rows: RowFile) -> Iterator[StepSample]:
    """The sampled steps of a run, in the order in which they were added: what its schedules follow
    beside configuration and data. ValueError names a broken line."""
    remedy = "remove the line, and schedules of steps that are run anew follow new times"
    return read_rows(rows.path, StepSample, "a sampled step", remedy)


def restore_learnt(
    prices: Prices, stored: CorrectionState | None, samples: RowFile, first_step: int
) -> CorrectionState:
    """What is known of these prices before step `start`: what a checkpoint knew (`known`), and the
    samples beyond it. Samples of steps to come under other prices are dropped."""
    key = price_digest(prices)
    samples.drop_except(lambda s: s.step < first_step or s.prices == key)
    learnt = stored if stored and stored.prices == key else CorrectionState(key)
    return replay_samples(learnt, read_samples(samples), first_step)


class Corrector:
    """Adaptive correction of one run (DFLOP, arXiv 2603.25120; our rules are in
    `schedule.correction`).

    Steps up to the last one that `learnt` knows are not sampled: they were by another run, whose
    decisions this one takes.

    Args:
      run: a planned run of process 0; its prices are as predicted.
      learnt: what `worker` schedules by (see `price_changes`).
    """

    def __init__(self, run: PlannedRun, worker: ScheduleWorker, learnt: CorrectionState):
        self._run, self._prices, self._worker = run, run.prices, worker
        self._learnt = learnt
        self._gain_s = self._overhead_s = 0.0  # of the last full window
        self._spent_s = 0.0  # in this window
        self._gain_is_pending = False  # what a full window gains
        self._last_logged: Correction | None = None  # the last that a line was about

    def learnt(self, step: int) -> CorrectionState:
        """What a run needs that goes on at a step, for its checkpoint."""
        return drop_old_changes(self._learnt, step)

    @property
    def report(self) -> dict[str, float]:
        """What metrics say: whether sampling is on, and why."""
        return {
            "sampling": float(self._learnt.monitor.on),
            "farthest_factor": 1.0 + self._learnt.state.deviation,
            "predicted_gain_s": self._gain_s,
            "overhead_s": self._overhead_s,
        }

    def after_step(self, trace: Trace, batch: PackedBatch) -> None:
        """Learn from a finished step, if it is one to sample; later batches are scheduled by what
        was learnt. The first switches of sampling are said, and later corrections that pay."""
        was_sampling = self._learnt.monitor.on
        if batch.step > self._learnt.last and is_sampling(self._learnt.monitor, batch.step):
            self._sample(trace, batch)
        if is_full(self._learnt.monitor):
            self._decide(batch)
        if self._learnt.monitor.on != was_sampling:
            self._log_switch(batch.step)

    def _log_switch(self, step: int) -> None:
        """Say that sampling goes on for the first time; that it goes off where what was learnt
        since the last such line gains more than sampling costs. All figures are in the metrics."""
        state = self._learnt.state
        if self._learnt.monitor.on:
            if self._last_logged is None:
                self._run.progress.log(
                    f"step {step}: task times are sampled, by which schedules are corrected"
                )
        elif (
            self._last_logged is None
            or learnt_gain_s(self._gain_s, self._last_logged, state) > self._overhead_s
        ):
            self._last_logged = state
            gain = (
                f"{1e3 * self._gain_s:.1f} ms a step"
                if self._gain_s >= _MIN_SHOWN_GAIN_S
                else "nothing"
            )
            self._run.progress.log(
                f"step {step}: schedules follow task times that are up to "
                f"{1 + state.deviation:.2f}x off the predicted ones, which by prediction saves "
                f"{gain}; sampling took {1e3 * self._overhead_s:.1f} ms a step"
            )

    def _sample(self, trace: Trace, batch: PackedBatch) -> None:
        step, previous = batch.step, self._learnt
        started_s = time.perf_counter()
        plan, prices, trainable = self._run.ex.plan, self._prices, self._run.ex.trainable
        expected = expected_times(plan, batch.schedule, prices, trainable)
        ratios = log_ratios(plan.layout, task_times(trace, batch.schedule), expected)
        state = add_ratios(previous.state, ratios)
        first_step = self._worker.update_prices(correct_prices(prices, state))
        self._spent_s += time.perf_counter() - started_s
        sample = StepSample(
            step, first_step, previous.prices, ratios, self._gain_s, self._overhead_s
        )
        assert self._run.folder is not None
        self._run.folder.rows[CORRECTIONS].append(sample)
        self._learnt = add_sample(drop_old_changes(previous, step), sample)

    def _decide(self, batch: PackedBatch) -> None:
        """Have the gain of a full window predicted, for this batch; once it is known, decide. What
        a kill leaves undecided is asked for again."""
        learnt = self._learnt
        if not self._gain_is_pending:
            corrected_prices = correct_prices(self._prices, learnt.state)
            self._worker.request_gain(batch.step, batch.loads, self._prices, corrected_prices)
            self._gain_is_pending = True
        elif (gain_s := self._worker.gain_s) is not None:
            self._gain_s, self._overhead_s = gain_s, self._spent_s / learnt.monitor.window
            self._gain_is_pending, self._spent_s = False, 0.0
            self._learnt = with_decision(learnt, self._gain_s, self._overhead_s)
