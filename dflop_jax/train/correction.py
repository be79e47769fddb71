"""Corrects the prices of later schedules by observed task times, if this shortens the steps."""

from __future__ import annotations

import time
from collections.abc import Iterator

from dflop_jax.records import Prices, Trace
from dflop_jax.report.row_file import RowFile, read_rows
from dflop_jax.report.run_folder import CORRECTIONS
from dflop_jax.schedule import correction as rules
from dflop_jax.schedule.correction import CorrectionState, StepSample
from dflop_jax.schedule.worker import ScheduleWorker
from dflop_jax.train.choose_plan import PlannedRun
from dflop_jax.train.feed import PackedBatch


def read_samples(rows: RowFile) -> Iterator[StepSample]:
    """Read the sampled steps of a run, oldest first. ValueError names a broken line."""
    remedy = "remove the line; steps that run again are then scheduled by new times"
    return read_rows(rows.path, StepSample, "a sampled step", remedy)


def restore_correction(
    prices: Prices, stored: CorrectionState | None, samples: RowFile, first_step: int
) -> CorrectionState:
    """Return the correction of these prices before the first step, from the checkpoint's `stored`
    and from later samples. Drops samples of coming steps that were taken under other prices."""
    key = rules.price_digest(prices)
    samples.drop_except(lambda s: s.step < first_step or s.prices == key)
    learnt = stored if stored and stored.prices == key else CorrectionState(key)
    return rules.replay_samples(learnt, read_samples(samples), first_step)


class Corrector:
    """Adaptive correction of one run, on process 0 (DFLOP, arXiv 2603.25120; our rules are in
    `schedule.correction`). The worker schedules by `learnt`. Steps that `learnt` includes are not
    sampled again: a resumed run repeats the decisions of the run before."""

    def __init__(self, run: PlannedRun, worker: ScheduleWorker, learnt: CorrectionState):
        self._run, self._prices, self._worker = run, run.prices, worker
        self._learnt = learnt
        self._gain_s = self._overhead_s = 0.0  # of the last full window
        self._spent_s = 0.0  # in this window
        self._gain_is_pending = False  # whether the gain of a full window is being predicted
        self._n_logged = 0  # logged switches of sampling

    def learnt(self, step: int) -> CorrectionState:
        """Return the state for the checkpoint after `step` steps."""
        return rules.drop_old_changes(self._learnt, step)

    @property
    def report(self) -> dict[str, float]:
        """The figures for metrics."""
        return {
            "sampling": float(self._learnt.is_on),
            "farthest_factor": self._learnt.correction.max_factor,
            "predicted_gain_s": self._gain_s,
            "overhead_s": self._overhead_s,
        }

    def after_step(self, trace: Trace, batch: PackedBatch) -> None:
        """Learn from a finished step if it is to be sampled; later batches are scheduled by the
        result. The first start and end of sampling are logged."""
        was_sampling = self._learnt.is_on
        if batch.step > self._learnt.last and self._learnt.is_sampling(batch.step):
            self._sample(trace, batch)
        if self._learnt.is_full:
            self._decide(batch)
        is_sampled = self._learnt.is_on
        if is_sampled == was_sampling or self._n_logged == 2:
            return
        self._n_logged += 1
        text = "sampling task times, to correct schedules"
        if not is_sampled:
            factor = self._learnt.correction.max_factor
            text = (
                f"schedules use measured task times, up to {factor:.2f}x off the predicted "
                f"ones; predicted saving: {1e3 * self._gain_s:.1f} ms a step; "
                f"sampling costs {1e3 * self._overhead_s:.1f} ms a step"
            )
        self._run.progress.log(f"step {batch.step}: {text}")

    def _sample(self, trace: Trace, batch: PackedBatch) -> None:
        step, previous = batch.step, self._learnt
        started_s = time.perf_counter()
        plan, prices, trainable = self._run.ex.plan, self._prices, self._run.ex.trainable
        expected = rules.expected_times(plan, batch.schedule, prices, trainable)
        ratios = rules.log_ratios(rules.task_times(trace, batch.schedule), expected)
        state = rules.add_ratios(previous.correction, ratios)
        first_step = self._worker.update_prices(rules.correct_prices(prices, state))
        self._spent_s += time.perf_counter() - started_s
        sample = StepSample(
            step, first_step, previous.prices, ratios, self._gain_s, self._overhead_s
        )
        assert self._run.folder is not None
        self._run.folder.rows[CORRECTIONS].append(sample)
        self._learnt = rules.add_sample(rules.drop_old_changes(previous, step), sample)

    def _decide(self, batch: PackedBatch) -> None:
        """Predict the gain of a full window for this batch; decide once the gain is known."""
        learnt = self._learnt
        if not self._gain_is_pending:
            corrected_prices = rules.correct_prices(self._prices, learnt.correction)
            self._worker.request_gain(batch.step, batch.loads, self._prices, corrected_prices)
            self._gain_is_pending = True
        elif (gain_s := self._worker.gain_s) is not None:
            self._gain_s, self._overhead_s = gain_s, self._spent_s / learnt.window
            self._gain_is_pending, self._spent_s = False, 0.0
            self._learnt = rules.with_decision(learnt, self._gain_s, self._overhead_s)
