"""Turns finished steps into rows of metrics, and stores the trace of a typical late step."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dflop_jax.data import Loader
from dflop_jax.records import Trace
from dflop_jax.report.metrics import LIVE_BYTES, SkippedUpdate, StepMetrics
from dflop_jax.report.trace import group_labels
from dflop_jax.runtime.step_result import LocalResult, StepHandle, StepResult
from dflop_jax.schedule.worker import ScheduleWorker
from dflop_jax.train import step_figures as figures
from dflop_jax.train.callbacks import StepDone
from dflop_jax.train.choose_plan import PlannedRun
from dflop_jax.train.correction import Corrector
from dflop_jax.train.feed import PackedBatch, Waits
from dflop_jax.train.memory_log import MemoryLog
from dflop_jax.train.optimizer import learning_rates
from dflop_jax.train.run_context import CompileCounts


@dataclass(frozen=True)
class StepReport:
    """A process's message to process 0 about a finished step."""

    local_result: LocalResult
    compiles: int
    stop: bool  # whether this process got a signal
    memory: dict[str, float]
    stop_reason: str  # the reason if a callback ends the run


@dataclass(frozen=True)
class LoopRequests:
    """What a process wants after a step."""

    stop: bool  # end the run on all processes
    save: bool  # save the next state; process 0's counts
    ends_trial: bool  # end the trial of the plan; process 0's counts


@dataclass(frozen=True)
class StepOutcome:
    """Process 0's message to all processes about a finished step."""

    done: StepDone
    compiles: int  # of all processes
    stop: bool
    stopped_by: str
    save: bool  # whether to save the next state
    ends_trial: bool  # whether the trial of the plan is decided


class StepLog:
    """Gathers every process's results of each step; process 0 (which has a folder) writes
    metrics.jsonl, the progress bar and, at the end, trace.json."""

    def __init__(
        self,
        run: PlannedRun,
        loader: Loader,
        counter: CompileCounts,
        corrector: Corrector | None,
        worker: ScheduleWorker | None,
    ):
        context, config = run.context, run.context.config
        self._run, self._config, self._peers = run, config.train, context.peers
        self._loader, self._corrector, self._worker = loader, corrector, worker
        self.skips = run.state.skips
        self.end_reason = ""  # the reason if skipped steps end the run, on process 0
        self._peak_flops = figures.peak_flops(config, context.devices)
        self._rates = learning_rates(config.train)
        peak = config.train.learning_rate
        self._factors = {g: rate / peak for g, rate in context.trained.rates.items()}
        self.losses = array("d")  # 8 bytes a step, not 32
        self.n_compiles = 0  # of all processes, after the first step
        self.step_s = array("d")  # on process 0
        self._counter, self._compiled = counter, counter.compiled
        self._last_step = config.train.steps - 1
        self._ended_s: float | None = None
        self._trace_and_batch: tuple[Trace, PackedBatch] | None = None
        self.memory = MemoryLog(context.devices, run.state.step, config.train.steps)
        self.n_unsupervised = 0  # steps of this process without a supervised token
        self._min_samples = config.plan.profile_samples

    def finish(
        self,
        handle: StepHandle,
        batch: PackedBatch,
        waits: Waits,
        requests: LoopRequests,
        *,
        is_drained: bool,
    ) -> StepOutcome:
        """Wait for a step on every process, log it and learn from it; return what all processes
        do next. `is_drained`: no later step is dispatched. ValueError if no step yet had a
        supervised token."""
        local_result = handle.local_result(self._peers.clock_offset_s)
        compiled, callbacks = self._counter.compiled, self._run.callbacks
        memory = self.memory.read(is_drained=is_drained)
        n_compiled, reason = compiled - self._compiled, callbacks.stop_reason
        report = StepReport(local_result, n_compiled, requests.stop, memory, reason)
        self._compiled = compiled
        reports = self._peers.gather("report", report, StepReport, step=batch.step)
        primary_outcome = None
        if self._peers.is_primary:
            result = handle.result([r.local_result for r in reports])
            loss, means = batch.loss.total(result.sums), batch.loss.means(result.sums)
            primary_outcome = StepOutcome(
                StepDone(batch.step, loss, means, result.grad_norm, result.applied, None),
                sum(r.compiles for r in reports),
                any(r.stop for r in reports),
                next((r.stop_reason for r in reports if r.stop_reason), ""),
                requests.save,
                requests.ends_trial,
            )
        outcome = self._peers.broadcast("verdict", primary_outcome, StepOutcome, step=batch.step)
        done = outcome.done
        self.n_compiles += outcome.compiles if self.losses else 0
        self.losses.append(done.loss)
        if self._peers.is_primary:
            if self._corrector:
                self._corrector.after_step(result.trace, batch)
            values = {
                "compiles": outcome.compiles,
                "memory": self.memory.add(batch.step, [r.memory for r in reports]),
                "process_s": figures.slowest_processes(result.process_s),
            }
            self._log(result, batch, waits, done, values)
        else:
            callbacks.after_step(done)
        self.skips = self.skips.with_step(done.step, done.grad_norm, done.updated)
        return outcome

    def _log(
        self,
        result: StepResult,
        batch: PackedBatch,
        waits: Waits,
        done: StepDone,
        values: Mapping[str, Any],
    ) -> None:
        run = self._run
        assert run.folder is not None
        row = self._make_row(result, batch, waits, done, values)
        row = replace(row, own=run.callbacks.after_step(replace(done, row=row)))
        self.step_s.append(row.step_s)
        run.folder.append(row)
        run.progress.update(row)
        if LIVE_BYTES in row.memory and (warning := self.memory.warning()):
            run.progress.log(warning)
        self._ended_s = result.ended_s
        # The last step but one: steady, and not the one that drains the pipeline.
        if self._trace_and_batch is None or batch.step < self._last_step:
            self._trace_and_batch = (result.trace, batch)
        self._check_supervised(batch)

    def _make_row(
        self,
        result: StepResult,
        batch: PackedBatch,
        waits: Waits,
        done: StepDone,
        values: Mapping[str, Any],
    ) -> StepMetrics:
        run, schedule, counts = self._run, batch.schedule, batch.counts
        layout, n_devices = run.ex.plan.layout, run.context.n_devices
        start_s = result.started_s if self._ended_s is None else self._ended_s
        step_s = max(result.ended_s - start_s, 0.0)
        # It is unknown when devices started to wait for the first step.
        idle_s = math.inf if self._ended_s is None else max(result.started_s - start_s, 0.0)
        waits_s = waits.idle_by_cause(idle_s)
        run.context.time_log.step(batch.step, waits_s)
        waits_s = waits_s if math.isfinite(idle_s) else {}
        offset_s = start_s - result.started_s
        rate = float(self._rates[batch.step - self.skips.count])  # which only updates advance
        return StepMetrics(
            step=batch.step,
            loss=done.loss,
            losses=done.losses,
            grad_norm=done.grad_norm,
            skipped=self._find_skip(result, batch.step),
            learning_rate=rate,
            learning_rates={g: rate * factor for g, factor in self._factors.items()},
            supervised_tokens=counts.supervised_tokens,
            n_bad=len(counts.bad),
            step_s=step_s,
            tokens_per_s=counts.used_tokens[layout.modules[-1]] / step_s if step_s > 0 else 0.0,
            phase_s=figures.phase_seconds(layout, result.trace, offset_s, step_s, waits_s),
            busy_fraction=result.trace.busy_fraction(),
            save_wait_s=waits.save_s,
            schedule_wait_s=waits.schedule_s,
            schedule_s=schedule.elapsed_s,
            makespan_s=schedule.makespan_s,
            lower_bound_s=schedule.lower_bound_s,
            integer_bound_s=schedule.integer_bound_s,
            schedule_gap=schedule.gap,
            schedule_work=schedule.work,
            made_by=schedule.made_by,
            groups=batch.groups_run,
            padding_fraction=batch.padding_fraction,
            imbalance=batch.imbalance,
            moved_in_node=counts.in_node,
            moved_across_nodes=counts.across_nodes,
            correction=self._corrector.report if self._corrector else {},
            baseline_s=self._worker.take_baselines(batch.step, step_s) if self._worker else {},
            **figures.measure_utilisation(
                counts.flops, step_s, layout, n_devices, self._peak_flops
            ),
            **values,
        )

    def _find_skip(self, result: StepResult, step: int) -> SkippedUpdate | None:
        """Log why a step was skipped; too many in a row set `end_reason`."""
        if result.applied:
            return None
        cause = figures.SPIKE if math.isfinite(result.grad_norm) else figures.NOT_FINITE
        names = tuple(self._run.source.label(i) for i in self._loader.indices(step))
        skipped = SkippedUpdate(cause, result.not_finite, names)
        text = f"step {step} changed no parameter: {figures.describe_skip(skipped)}"
        self._run.progress.log(text)
        n_in_a_row = self.skips.in_a_row + 1
        if n_in_a_row >= self._config.max_bad_steps:
            self.end_reason = f"{text} ({n_in_a_row} in a row; see train.max_bad_steps)"
        return skipped

    def _check_supervised(self, batch: PackedBatch) -> None:
        """Count steps without a supervised token and name the first of them.

        ValueError if none of the first samples, as many as a profile reads, is supervised.
        """
        if batch.loss.is_supervised:
            return
        self.n_unsupervised += 1
        if self.n_unsupervised == 1:
            self._run.progress.log(f"step {batch.step} has no supervised token; others are counted")
        n, limit = (batch.step + 1) * self._config.global_batch, self._min_samples
        none_supervised = self.n_unsupervised == batch.step + 1
        if none_supervised and (n >= limit or batch.step == self._last_step):
            raise ValueError(
                f"none of the first {n} samples has a supervised token; give answers a weight "
                "above 0 (weight, loss and train of their turns), or raise data.max_tokens if "
                "it cuts them off"
            )

    def exclude_pause(self) -> None:
        """Exclude work since the last step, such as an evaluation, from the step time."""
        self._ended_s = None

    def write_trace(self) -> None:
        if self._trace_and_batch is not None and self._run.folder is not None:
            trace, batch = self._trace_and_batch
            self._run.folder.write_trace([trace], group_labels([batch.schedule]))
