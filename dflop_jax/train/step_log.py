"""Turns finished steps into metrics rows, and keeps the trace of a typical late step."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dflop_jax.records import Trace
from dflop_jax.report.metrics import SkippedUpdate, StepMetrics
from dflop_jax.report.trace import group_labels
from dflop_jax.runtime.step_result import LocalResult, StepHandle, StepResult
from dflop_jax.train.callbacks import StepDone
from dflop_jax.train.choose_plan import PlannedRun
from dflop_jax.train.correction import Corrector
from dflop_jax.train.feed import PackedBatch, Waits
from dflop_jax.train.optimizer import learning_rates
from dflop_jax.train.run_context import CompileCounts
from dflop_jax.train.step_figures import (
    SkippedSteps,
    describe_skip,
    find_end_reason,
    make_skipped_update,
    max_by_name,
    measure_memory,
    measure_utilisation,
    peak_flops,
    phase_seconds,
    slowest_processes,
)

log = logging.getLogger("dflop_jax")
# Samples after which a run is refused that has had no supervised token; a run may be shorter.
MIN_SAMPLES = 256


@dataclass(frozen=True)
class StepReport:
    """What a process tells process 0 about a finished step; `stop`: a signal came to it,
    `memory_bytes` is what it holds, `stop_reason` why a callback ends the run."""

    local_result: LocalResult
    compiles: int
    stop: bool
    memory_bytes: dict[str, float]
    stop_reason: str = ""


@dataclass(frozen=True)
class StepOutcome:
    """What process 0 tells all about a finished step; `compiles` are those of all processes,
    `stop`, `stopped_by`: see `StepReport`, `save`: the next state is to be saved."""

    done: StepDone
    compiles: int
    stop: bool
    stopped_by: str
    save: bool


class StepLog:
    """Gathers what the processes saw of each step; process 0 (which has a folder) writes
    metrics.jsonl, the progress bar and, at the end, trace.json. `skips` counts the steps whose
    updates are left out; `names` gives the samples of a step."""

    def __init__(
        self,
        run: PlannedRun,
        counter: CompileCounts,
        corrector: Corrector | None,
        skips: SkippedSteps,
        names: Callable[[int], Sequence[str]],
    ):
        context, config = run.context, run.context.config
        self._run, self._config, self._peers = run, config.train, context.peers
        self._corrector, self._names = corrector, names
        self.skips = skips
        self.end_reason = ""  # why skipped steps end the run, on process 0
        self._peak_flops = peak_flops(config, context.devices)
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
        self.n_unsupervised = 0  # steps without a supervised token, on process 0

    def finish(
        self,
        handle: StepHandle,
        batch: PackedBatch,
        waits: Waits,
        stop: bool,
        save: bool = False,
    ) -> StepOutcome:
        """Wait for a step on every process, log it and learn from it; `stop` asks all to end the
        run, process 0's `save` to save.

        Raises:
          ValueError: no step of the run so far had a supervised token.
        """
        local_result = handle.local_result(self._peers.clock_offset_s)
        compiled, callbacks = self._counter.compiled, self._run.callbacks
        memory_bytes = measure_memory(self._run.context.devices)
        report = StepReport(
            local_result, compiled - self._compiled, stop, memory_bytes, callbacks.stop_reason
        )
        self._compiled = compiled
        reports = self._peers.gather("report", report, StepReport, step=batch.step)
        primary_outcome = None
        if self._peers.is_primary:
            result = handle.result([r.local_result for r in reports])
            sums, means = result.sums, batch.loss.means(result.sums)
            norm = result.grad_norm
            primary_outcome = StepOutcome(
                StepDone(batch.step, batch.loss.total(sums), means, norm, result.applied, None),
                sum(r.compiles for r in reports),
                any(r.stop for r in reports),
                next((r.stop_reason for r in reports if r.stop_reason), ""),
                save,
            )
        outcome = self._peers.broadcast("verdict", primary_outcome, StepOutcome, step=batch.step)
        done = outcome.done
        self.n_compiles += outcome.compiles if self.losses else 0
        self.losses.append(done.loss)
        if self._peers.is_primary:
            if self._corrector:
                self._corrector.after_step(result.trace, batch)
            process_s = handle.process_seconds(result) if self._peers.n_processes > 1 else {}
            memory_bytes = max_by_name(r.memory_bytes for r in reports)
            skipped = make_skipped_update(result, partial(self._names, batch.step))
            self._log(result, batch, waits, outcome, memory_bytes, process_s, skipped)
        else:
            callbacks.after_step(done)
        self.skips = self.skips.with_step(done.step, done.grad_norm, done.updated)
        if self._peers.is_primary:
            in_a_row, limit = self.skips.in_a_row, self._config.max_bad_steps
            self.end_reason = find_end_reason(done.step, skipped, in_a_row, limit)
        return outcome

    def _log(
        self,
        result: StepResult,
        batch: PackedBatch,
        waits: Waits,
        outcome: StepOutcome,
        memory_bytes: Mapping[str, float],
        process_s: Mapping[int, float],
        skipped: SkippedUpdate | None,
    ) -> None:
        run = self._run
        assert run.folder is not None
        start_s = result.started_s if self._ended_s is None else self._ended_s
        # When devices began to wait for the first step is not known.
        idle_s = math.inf if self._ended_s is None else max(result.started_s - start_s, 0.0)
        waits_s = waits.idle_by_cause(idle_s)
        run.context.time_log.step(batch.step, waits_s)
        if skipped:
            run.progress.log(f"step {batch.step} changed no parameter: {describe_skip(skipped)}")
        row = StepMetrics(
            loss=outcome.done.loss,
            losses=outcome.done.losses,
            grad_norm=result.grad_norm,
            busy_fraction=result.trace.busy_fraction(),
            compiles=outcome.compiles,
            schedule_wait_s=waits.schedule_s,
            save_wait_s=waits.save_s,
            memory_bytes=memory_bytes,
            correction=self._corrector.report if self._corrector else {},
            process_s=slowest_processes(process_s),
            skipped=skipped,
            **self._time_figures(result, batch, start_s, waits_s if math.isfinite(idle_s) else {}),
            **self._learning_rates(batch.step),
            **batch_figures(batch),
        )
        user_metrics = run.callbacks.after_step(replace(outcome.done, row=row))
        row = replace(row, own=user_metrics) if user_metrics else row
        self.step_s.append(row.step_s)
        run.folder.append(row)
        run.progress.update(row)
        self._ended_s = result.ended_s
        # The last step but one: steady, and not the one that drains the pipeline.
        if self._trace_and_batch is None or batch.step < self._last_step:
            self._trace_and_batch = (result.trace, batch)
        if not batch.loss.is_supervised:
            self._note_unsupervised(batch.step)

    def _time_figures(
        self, result: StepResult, batch: PackedBatch, start_s: float, waits_s: Mapping[str, float]
    ) -> dict[str, Any]:
        """Return the fields of `StepMetrics` that follow from the step's seconds."""
        layout, n_devices = self._run.ex.plan.layout, self._run.context.n_devices
        step_s = max(result.ended_s - start_s, 0.0)
        tokens, trace = batch.counts.used_tokens[layout.modules[-1]], result.trace
        offset_s = start_s - result.started_s
        return {
            "step_s": step_s,
            "tokens_per_s": tokens / step_s if step_s > 0 else 0.0,
            "phase_s": phase_seconds(layout, trace, offset_s, step_s, waits_s),
            **measure_utilisation(batch.counts.flops, step_s, layout, n_devices, self._peak_flops),
        }

    def _learning_rates(self, step: int) -> dict[str, Any]:
        """Return the fields of `StepMetrics` with learning rates: the schedule advances only with
        the updates that are made."""
        rate = float(self._rates[step - self.skips.count])
        by_group = {g: rate * factor for g, factor in self._factors.items()}
        return {"learning_rate": rate, "learning_rates": by_group}

    def _note_unsupervised(self, step: int) -> None:
        self.n_unsupervised += 1
        steps_done = step + 1
        if self.n_unsupervised == 1:
            log.warning("step %d has no supervised token; others are counted at the end", step)
        n_samples = steps_done * self._config.global_batch
        if self.n_unsupervised == steps_done and (
            n_samples >= MIN_SAMPLES or step == self._last_step
        ):
            raise ValueError(
                f"none of the first {n_samples} samples has a supervised token; give answers a "
                "weight above 0 (weight, loss and train of their turns), or raise data.max_tokens "
                "where it cuts them away"
            )

    def exclude_pause(self) -> None:
        """Something other than steps ran (an evaluation): do not count it as step time."""
        self._ended_s = None

    def write_trace(self) -> None:
        """Write the trace that was kept, if there is one."""
        if self._trace_and_batch is not None and self._run.folder is not None:
            trace, batch = self._trace_and_batch
            self._run.folder.write_trace([trace], group_labels([batch.schedule]))


def batch_figures(batch: PackedBatch) -> dict[str, Any]:
    """Return the fields of `StepMetrics` that a batch and its schedule have before the step."""
    schedule, counts = batch.schedule, batch.counts
    return {
        "step": batch.step,
        "supervised_tokens": counts.supervised_tokens,
        "padding_fraction": batch.padding_fraction,
        "groups": batch.groups_run,
        "schedule_s": schedule.elapsed_s,
        "makespan_s": schedule.makespan_s,
        "lower_bound_s": schedule.lower_bound_s,
        "made_by": schedule.made_by,
        "schedule_gap": schedule.gap,
        "integer_bound_s": schedule.integer_bound_s,
        "schedule_work": schedule.work,
        "n_bad": len(counts.bad),
        "imbalance": batch.imbalance,
        "moved_in_node": counts.in_node,
        "moved_across_nodes": counts.across_nodes,
    }
