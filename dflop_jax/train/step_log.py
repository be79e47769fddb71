"""Turns finished steps into metrics rows, and keeps the trace of a typical late step."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dflop_jax.records import Trace
from dflop_jax.report.metrics import SkippedUpdate, StepMetrics
from dflop_jax.report.trace import group_labels
from dflop_jax.runtime.step_result import LocalResult, StepHandle, StepResult
from dflop_jax.train.callbacks import StepDone
from dflop_jax.train.choose_plan import ReadyRun
from dflop_jax.train.compile_cache import Compiles
from dflop_jax.train.correction import Corrector
from dflop_jax.train.feed import ReadyBatch, Waits
from dflop_jax.train.optimizer import learning_rates
from dflop_jax.train.skipped_samples import Skips, end_reason, reason, skipped_update
from dflop_jax.train.step_figures import (
    memory_in_use,
    most_of,
    peak_flops,
    phase_seconds,
    slowest,
    utilisation,
)

log = logging.getLogger("dflop_jax")
# Samples after which a run is refused that has had no supervised token; a run may be shorter.
FEWEST_SAMPLES = 256


@dataclass(frozen=True)
class Report:
    """What a process tells process 0 about a finished step; `stop`: a signal came to it,
    `memory_bytes` is what it holds, `stops_for` why a callback ends the run."""

    part: LocalResult
    compiles: int
    stop: bool
    memory_bytes: dict[str, float]
    stops_for: str = ""


@dataclass(frozen=True)
class Verdict:
    """What process 0 tells all about a finished step; `compiles` are those of all processes,
    `stop`, `stopped_by`: see `Report`, `save`: the next state is to be saved."""

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
        ready: ReadyRun,
        counter: Compiles,
        corrector: Corrector | None,
        skips: Skips,
        names: Callable[[int], Sequence[str]],
    ):
        place, config = ready.place, ready.place.config
        self._ready, self._config, self._peers = ready, config.train, place.peers
        self._corrector, self._names = corrector, names
        self.skips = skips
        self.end_reason = ""  # why skipped steps end the run, on process 0
        self._peak_flops = peak_flops(config, place.devices)
        self._rates = learning_rates(config.train)
        peak = config.train.learning_rate
        self._factors = {g: rate / peak for g, rate in place.trained.rates.items()}
        self.losses = array("d")  # 8 bytes a step, not 32
        self.n_compiles = 0  # of all processes, after the first step
        self.step_s = array("d")  # on process 0
        self._counter, self._compiled = counter, counter.compiled
        self._last_step = config.train.steps - 1
        self._ended_s: float | None = None
        self._kept: tuple[Trace, ReadyBatch] | None = None
        self.n_unsupervised = 0  # steps without a supervised token, on process 0

    def finish(
        self,
        handle: StepHandle,
        batch: ReadyBatch,
        waits: Waits,
        stop: bool,
        save: bool = False,
    ) -> Verdict:
        """Wait for a step on every process, log it and learn from it; `stop` asks all to end the
        run, process 0's `save` to save.

        Raises:
          ValueError: no step of the run so far had a supervised token.
        """
        part = handle.local_result(self._peers.clock_offset_s)
        compiled, callbacks = self._counter.compiled, self._ready.callbacks
        held = memory_in_use(self._ready.place.devices)
        report = Report(part, compiled - self._compiled, stop, held, callbacks.stops_for)
        self._compiled = compiled
        reports = self._peers.gather("report", report, Report, step=batch.step)
        decided = None
        if self._peers.is_primary:
            result = handle.result([r.part for r in reports])
            sums, means = result.sums, batch.loss.means(result.sums)
            norm = result.grad_norm
            decided = Verdict(
                StepDone(batch.step, batch.loss.total(sums), means, norm, result.applied, None),
                sum(r.compiles for r in reports),
                any(r.stop for r in reports),
                next((r.stops_for for r in reports if r.stops_for), ""),
                save,
            )
        verdict = self._peers.broadcast("verdict", decided, Verdict, step=batch.step)
        done = verdict.done
        self.n_compiles += verdict.compiles if self.losses else 0
        self.losses.append(done.loss)
        if self._peers.is_primary:
            if self._corrector:
                self._corrector.after_step(result.trace, batch)
            process_s = handle.process_seconds(result) if self._peers.n_processes > 1 else {}
            held = most_of(r.memory_bytes for r in reports)
            skipped = skipped_update(result, partial(self._names, batch.step))
            self._log(result, batch, waits, verdict, held, process_s, skipped)
        else:
            callbacks.after_step(done)
        self.skips = self.skips.after(done.step, done.grad_norm, done.updated)
        if self._peers.is_primary:
            in_a_row, limit = self.skips.in_a_row, self._config.max_bad_steps
            self.end_reason = end_reason(done.step, skipped, in_a_row, limit)
        return verdict

    def _log(
        self,
        result: StepResult,
        batch: ReadyBatch,
        waits: Waits,
        verdict: Verdict,
        memory_bytes: Mapping[str, float],
        process_s: Mapping[int, float],
        skipped: SkippedUpdate | None,
    ) -> None:
        ready, layout = self._ready, self._ready.ex.plan.layout
        n_devices = ready.place.n_devices
        assert ready.folder is not None
        begun = result.started_s if self._ended_s is None else self._ended_s
        step_s = max(result.ended_s - begun, 0.0)
        # Of the first step nothing tells when devices began to wait.
        idle_s = math.inf if self._ended_s is None else max(result.started_s - begun, 0.0)
        waits_s = waits.of_devices(idle_s)
        ready.place.time.step(batch.step, waits_s)
        if skipped:
            ready.progress.log(f"step {batch.step} changed no parameter: {reason(skipped)}")
        # The rate goes on with the updates that are made.
        rate = float(self._rates[batch.step - self.skips.count])
        row = StepMetrics(
            step=batch.step,
            loss=verdict.done.loss,
            losses=verdict.done.losses,
            supervised_tokens=batch.counts.supervised_tokens,
            step_s=step_s,
            tokens_per_s=batch.counts.used_tokens[layout.modules[-1]] / step_s
            if step_s > 0
            else 0.0,
            learning_rate=rate,
            learning_rates={g: rate * factor for g, factor in self._factors.items()},
            grad_norm=result.grad_norm,
            busy_fraction=result.trace.busy_fraction(),
            padding_fraction=batch.padding_fraction,
            groups=batch.groups_run,
            compiles=verdict.compiles,
            schedule_s=batch.schedule.elapsed_s,
            schedule_wait_s=waits.schedule_s,
            save_wait_s=waits.save_s,
            makespan_s=batch.schedule.makespan_s,
            lower_bound_s=batch.schedule.lower_bound_s,
            made_by=batch.schedule.made_by,
            schedule_gap=batch.schedule.gap,
            integer_bound_s=batch.schedule.integer_bound_s,
            schedule_work=batch.schedule.work,
            n_bad=len(batch.counts.bad),
            phase_s=phase_seconds(
                layout,
                result.trace,
                begun - result.started_s,
                step_s,
                waits_s if math.isfinite(idle_s) else {},
            ),
            imbalance=batch.imbalance,
            memory_bytes=memory_bytes,
            moved_in_node=batch.counts.in_node,
            moved_across_nodes=batch.counts.across_nodes,
            correction=self._corrector.report if self._corrector else {},
            process_s=slowest(process_s),
            skipped=skipped,
            **utilisation(batch.counts.flops, step_s, layout, n_devices, self._peak_flops),
        )
        own = ready.callbacks.after_step(replace(verdict.done, row=row))
        row = replace(row, own=own) if own else row
        self.step_s.append(step_s)
        ready.folder.append(row)
        ready.progress.update(row)
        self._ended_s = result.ended_s
        # The last step but one: steady, and not the one that drains the pipeline.
        if self._kept is None or batch.step < self._last_step:
            self._kept = (result.trace, batch)
        if not batch.loss.is_supervised:
            self._note_unsupervised(batch.step)

    def _note_unsupervised(self, step: int) -> None:
        self.n_unsupervised += 1
        done = step + 1
        if self.n_unsupervised == 1:
            log.warning("step %d has no supervised token; others are counted at the end", step)
        n_samples = done * self._config.global_batch
        if self.n_unsupervised == done and (n_samples >= FEWEST_SAMPLES or step == self._last_step):
            raise ValueError(
                f"none of the first {n_samples} samples has a supervised token; give answers a "
                "weight above 0 (weight, loss and train of their turns), or raise data.max_tokens "
                "where it cuts them away"
            )

    def pause(self) -> None:
        """Something other than steps ran (an evaluation): do not count it as step time."""
        self._ended_s = None

    def write_trace(self) -> None:
        """Write the trace that was kept, if there is one."""
        if self._kept is not None and self._ready.folder is not None:
            trace, batch = self._kept
            self._ready.folder.write_trace([trace], group_labels([batch.schedule]))
