"""The steps of a run: feed, dispatch, log, save, evaluate, and stop on request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import msgspec

from dflop_jax.config_fields import parse_profile_steps
from dflop_jax.data import make_loader
from dflop_jax.distributed.hang_watch import TaskProgress
from dflop_jax.distributed.process_exit import RunFailed, preemption
from dflop_jax.distributed.processes import report_step
from dflop_jax.profile.needed import needed_flops
from dflop_jax.report.run_folder import CORRECTIONS, XPROF
from dflop_jax.report.summary import trial_lines
from dflop_jax.report.wall_time import END, REDECISION, SAVE, TRAINING
from dflop_jax.runtime.step_result import StepHandle
from dflop_jax.schedule.buckets.sizes import oversize_samples
from dflop_jax.schedule.correction import price_changes
from dflop_jax.schedule.worker import ScheduleWorker, SolverSetup
from dflop_jax.train.callbacks import Evaluation, FitResult
from dflop_jax.train.change_plan import Handover, prepare_handover
from dflop_jax.train.choose_plan import PlannedRun, start_trial
from dflop_jax.train.correction import Corrector, restore_correction
from dflop_jax.train.evaluate import HeldOutEvaluator
from dflop_jax.train.feed import (
    PackedBatch,
    Packer,
    Waits,
    feed_batches,
    find_local_ranks,
    mark_sections,
)
from dflop_jax.train.plan_timer import load_count_program
from dflop_jax.train.planning import load_baselines
from dflop_jax.train.redecide import NewPlan, Redecider
from dflop_jax.train.resume import RunState
from dflop_jax.train.run_context import count_compiles
from dflop_jax.train.step_figures import row_tokens
from dflop_jax.train.step_log import LoopRequests, StepLog
from dflop_jax.train.trials import TrialRun, list_results, next_plan


class StepProfiler:
    """Writes one trace of `train.profile_steps`, for XProf and Perfetto. `drain` waits for all
    dispatched steps, so that only the traced steps run on the devices."""

    def __init__(self, run: PlannedRun, first_step: int, drain: Callable[[], None]):
        config, self._log, self._drain = run.context.config, run.progress.log, drain
        requested = parse_profile_steps(config.train.profile_steps)
        self._steps = range(max(requested.start, first_step), requested.stop)
        # One folder per process: jax names the files by host only.
        name = f"process-{run.context.peers.process_index:05d}"
        self._folder = Path(config.run_dir, XPROF, name)
        self._on = False

    def before_step(self, step: int) -> None:
        if self._steps and step == self._steps[0]:
            self._drain()
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # host calls would hide the rest
            jax.profiler.start_trace(
                self._folder, create_perfetto_trace=True, profiler_options=options
            )
            self._on = True

    def after_step(self, step: int) -> None:
        if self._on and step == self._steps[-1]:
            self._drain()
            self.close()
            self._log(f"traced steps {self._steps[0]} to {step}: {self._folder.parent}")

    def close(self) -> None:
        if self._on:
            self._on = False
            jax.profiler.stop_trace()


class TrainLoop:
    """One process's part of the steps of a run. It ends early to change to `next_plan`."""

    def __init__(self, run: PlannedRun):
        context, ex = run.context, run.ex
        self._run, self.config, self.peers, self.ex = run, context.config, context.peers, ex
        self.saver, self.progress = run.saver, run.progress
        needed = needed_flops(context.model, row_tokens(ex.plan.layout), context.trained.frozen)
        self.packer = Packer(
            ex.plan, context.model, find_local_ranks(ex.programs), self.peers, needed
        )
        loader = partial(make_loader, self.config, run.source, model=context.model)
        self.loader = loader(partial(oversize_samples, plan=ex.plan))
        self._corrector: Corrector | None = None
        self._trial = start_trial(run)
        self._redecider = Redecider(run, loader().loads)  # before it replaces oversized samples
        self.next_plan: NewPlan | None = None
        self.handover: Handover | None = None  # to `next_plan`; None: go on from a checkpoint
        self._evaluator: HeldOutEvaluator | None = None
        self._reported_stall_s = 0.0
        self._save_requested = False  # set by process 0 when `checkpoint.every_s` are over
        self._trial_is_decided = False  # set by process 0
        self._stop_reason = ""
        # States of saves whose last steps are pending.
        self._pending_states: list[tuple[RunState, Future[Mapping[str, Any]]]] = []
        self._unreported_saves: list[int] = []  # saved steps that callbacks do not know yet

    def run(self, stack: ExitStack) -> FitResult:
        """Run the remaining steps, and save the result."""
        config, context, state = self.config, self._run.context, self._run.state
        first_step = 0
        if state.loader:
            first_step = self.loader.restore(state.loader, config.data.changed)
        self._steps_done = first_step
        self._saved_step = first_step if self._run.is_saved else -1
        self._saved_s = time.monotonic()
        worker = self._start_worker(stack, first_step)
        if self._run.held_out is not None:
            self._evaluator = HeldOutEvaluator(self._run, self.packer)
            self.saver.store.best = self._evaluator.best[0]
        counter = stack.enter_context(count_compiles())
        self.log = StepLog(self._run, self.loader, counter, self._corrector, worker)
        if self._trial:  # its failure leads back to this state
            with context.time_log.track(SAVE):
                self._save(first_step)
                self.saver.wait()
        steps = range(first_step, config.train.steps)
        if first_step and steps and self._is_evaluation_due(first_step):
            self._evaluate(first_step)  # a run that ended early has not evaluated yet
        batches = feed_batches(self.loader, worker, self.packer, steps)
        with preemption(self.progress.log) as signal_received:
            context.time_log.switch_to(TRAINING)
            pending_tasks = self.ex.pending_tasks
            context.sections.tasks = lambda: TaskProgress(*pending_tasks.progress())
            with closing(batches):
                preempted = self._run_steps(
                    mark_sections(context.sections, batches, first_step), signal_received
                )
            context.sections.tasks = TaskProgress
            context.time_log.switch_to(END)
            if self.next_plan is not None:  # a signal may have come during the search
                preempted |= any(self.peers.all_gather("signal", signal_received.is_set(), bool))
            steps_done = self._steps_done
            if not preempted:
                self._prepare_handover(steps_done)
            with context.time_log.track(SAVE):
                if config.checkpoint.saves and (
                    self.handover is None or self._is_save_due(steps_done)
                ):
                    self._save(steps_done)
                self.saver.wait()
            self._report_saves()
        evaluation = None
        if self._evaluator and not preempted and self.next_plan is None:
            row = self._evaluator.row
            evaluation = row if row and row.step == steps_done else self._evaluate(steps_done)
        self.log.write_trace()
        if n := self.log.n_unsupervised:
            self.progress.log(f"{n} of {steps_done - first_step} steps had no supervised token")
        if preempted:
            hint = "continue with --resume auto" if config.checkpoint.saves else "nothing is saved"
            self.progress.log(f"preempted at step {steps_done}; {hint}")
        elif self._stop_reason:
            self.progress.log(f"stopped after step {steps_done}: {self._stop_reason}")
        if error := self.saver.error_text:
            raise RunFailed(f"the last steps are not saved: {error}; free disk space and resume")
        return FitResult(
            Path(config.run_dir),
            tuple(self.log.losses),
            evaluation,
            self.log.n_compiles,
            steps_done,
            preempted,
            self._stop_reason,
        )

    def _start_worker(self, stack: ExitStack, first_step: int) -> ScheduleWorker | None:
        """Start the schedule solver and the correction of its prices, on process 0."""
        folder, prices, config = self._run.folder, self._run.prices, self.config.schedule
        if folder is None:
            return None
        learnt, samples = None, folder.rows[CORRECTIONS]
        if config.correct and not self._trial:  # else the prices of a trial's steps would differ
            learnt = restore_correction(prices, self._run.state.learnt, samples, first_step)
        else:
            samples.drop_except(lambda sample: sample.step < first_step)
        plan, context = self.ex.plan, self._run.context
        program = load_count_program(plan, self.config.cache_dir)
        n_steps = self.config.train.steps - first_step
        baselines = load_baselines(context, self._run.profile, plan, n_steps)
        worker = ScheduleWorker(
            self.loader.loads,
            SolverSetup(plan, tuple(self.ex.trainable), config.work or None, program, baselines),
            prices,
            changes=price_changes(prices, learnt) if learnt else None,
            first_step=first_step,
            stop_step=self.config.train.steps,
            ahead=config.ahead,
        )
        stack.enter_context(closing(worker))
        if learnt:
            self._corrector = Corrector(self._run, worker, learnt)
        return worker

    def _run_steps(
        self, batches: Iterator[tuple[PackedBatch, Waits]], signal_received: threading.Event
    ) -> bool:
        """Run the steps; return whether a signal or `train.max_hours` ended them early."""
        pending: tuple[StepHandle, PackedBatch, Waits] | None = None
        signalled = False

        def finish(*, is_drained: bool) -> None:
            nonlocal pending, signalled
            if pending is None:
                return
            handle, batch, waits = pending
            pending = None
            self.saver.check()
            waits = replace(waits, save_s=self.saver.stall_s - self._reported_stall_s)
            self._reported_stall_s = self.saver.stall_s
            is_time_over = time.monotonic() > self._run.ends_s
            stops = signal_received.is_set() or is_time_over
            trial = self._trial
            ends_trial = trial is not None and trial.is_decided
            requests = LoopRequests(stops, self._is_due_to_save(), ends_trial)
            verdict = self.log.finish(handle, batch, waits, requests, is_drained=is_drained)
            if trial and self.peers.is_primary:
                trial.add_step(batch.step, self.log.step_s[-1], batch.schedule.makespan_s)
            if is_time_over and not signalled:
                self.progress.log(f"{self.config.train.max_hours:g} hours are over; saving")
            signalled |= verdict.stop
            self._stop_reason = self._stop_reason or verdict.stopped_by
            self._save_requested |= verdict.save
            self._trial_is_decided |= verdict.ends_trial
            self._steps_done = batch.step + 1
            report_step()
            self._complete_saves()
            self._report_saves()
            if self.log.end_reason:
                raise RunFailed(self.log.end_reason)

        def drain() -> None:
            finish(is_drained=True)
            self.log.exclude_pause()

        with closing(StepProfiler(self._run, self._steps_done, drain)) as profiler:
            for batch, waits in batches:
                for c in self._run.callbacks.active:
                    c.before_step(batch.step)
                limit = self.log.skips.norm_limit(batch.step, self.config.train.loss_spike)
                profiler.before_step(batch.step)
                with jax.profiler.StepTraceAnnotation("step", step_num=batch.step):
                    handle = self.ex.run_step(
                        batch.schedule, batch.groups, batch.loss.scales, norm_limit=limit
                    )
                # Wait for the previous step only now, so that the devices never wait for the host.
                finish(is_drained=False)
                pending = (handle, batch, waits)
                profiler.after_step(batch.step)
                if self.log.memory.is_reading_due(batch.step + 1):
                    finish(is_drained=True)
                if signalled or self._stop_reason:
                    break
                self._run_due_actions(batch.step + 1, drain)
                if self.next_plan is not None or signalled or self._stop_reason:
                    break
            finish(is_drained=True)
        return signalled and self._steps_done < self.config.train.steps

    def _run_due_actions(self, steps_done: int, drain: Callable[[], None]) -> None:
        """Save, evaluate and search for another plan when each is due."""
        if steps_done == self.config.train.steps:
            return
        redecide_every = self.config.plan.redecide_every
        if self._trial:
            if self._trial_is_decided or steps_done == self._trial.stop_step:
                drain()
                self.next_plan = self._end_trial(self._trial, steps_done)
                return  # the end of the loop saves if due, and the next one evaluates
        elif redecide_every and steps_done % redecide_every == 0:
            with self._run.context.time_log.track(REDECISION):
                self.next_plan = self._redecider.propose_plan(
                    steps_done, self.log.step_s[-redecide_every:]
                )
            if self.next_plan:
                return
        if self._is_save_due(steps_done):
            self._save(steps_done)
        if self._is_evaluation_due(steps_done):
            drain()
            self._evaluate(steps_done)

    def _end_trial(self, trial: TrialRun, steps_done: int) -> NewPlan:
        """Return the plan of the next trial, or the chosen one, on all processes together."""
        new = None
        if self.peers.is_primary:
            trials = trial.results()
            plan = next_plan(trials)
            assert plan is not None
            new = NewPlan(plan, self._run.profile, trials)
            lines = trial_lines(replace(plan, trials=list_results(trials)))
            self.progress.log(f"after step {steps_done}: " + "; ".join(lines))
        return self.peers.broadcast(f"trial/{steps_done}", new, NewPlan)

    def _is_save_due(self, steps_done: int) -> bool:
        every = self.config.checkpoint.every
        ends_trial = self.next_plan is not None and self.next_plan.trials is not None
        return self._save_requested or ends_trial or bool(every and steps_done % every == 0)

    def _prepare_handover(self, steps_done: int) -> None:
        """If the plan changes, plan how the state moves to it; `_fit_plan` moves it."""
        if (new := self.next_plan) is None:
            return
        is_saved = self._is_save_due(steps_done) or steps_done == self._saved_step
        state = replace(self._state(steps_done), skips=self.log.skips)
        context = self._run.context
        with context.time_log.track(REDECISION):
            self.handover = prepare_handover(context, self.ex, new.plan, state, is_saved=is_saved)
        if self.handover is None:
            self.progress.log(f"after step {steps_done}: no memory to move the state in; saving it")

    def _is_evaluation_due(self, steps_done: int) -> bool:
        every = self.config.train.eval_every
        return bool(self._evaluator and every and steps_done % every == 0)

    def _evaluate(self, steps_done: int) -> Evaluation:
        """Evaluate the state after finished steps; save it if it is the best one."""
        evaluator = self._evaluator
        assert evaluator is not None
        row = evaluator.evaluate(steps_done)
        if self.config.checkpoint.keep_best and row.loss < evaluator.best[1]:
            self._save(steps_done)
            self.saver.wait()
            is_saved = steps_done in self.saver.store.steps()
            if self.peers.broadcast(f"whole/{steps_done}", is_saved, bool):
                evaluator.best = steps_done, row.loss
                self.saver.store.best = steps_done
                self.progress.log("  best so far; its checkpoint is kept")
        return row

    def _is_due_to_save(self) -> bool:
        """Return whether `checkpoint.every_s` are over and no save is pending."""
        every_s = self.config.checkpoint.every_s
        since_s = time.monotonic() - self._saved_s
        return every_s > 0 and since_s >= every_s and not self.saver.is_busy

    def _save(self, steps_done: int) -> None:
        """Start to save the state, unless it is saved already."""
        self._save_requested = False
        if steps_done == self._saved_step:
            return
        self._saved_step, self._saved_s = steps_done, time.monotonic()
        pending = Future[Mapping[str, Any]]()
        self._pending_states.append((self._state(steps_done), pending))
        self._complete_saves()
        self.saver.save(steps_done, pending)
        if self._run.callbacks.active:
            self._unreported_saves.append(steps_done)

    def _state(self, steps_done: int) -> RunState:
        """Return the run's state after these steps, but for the skipped ones."""
        state = self._run.state
        if new := self.next_plan:  # a run that is killed before it changes resumes under this plan
            trials = state.trials if new.trials is None else new.trials
            state = replace(state, plan=new.plan, profile=new.profile, prices=None, trials=trials)
        return replace(
            state,
            step=steps_done,
            loader=self.loader.state(steps_done),
            learnt=self._corrector.learnt(steps_done) if self._corrector else None,
        )

    def _complete_saves(self) -> None:
        """Complete the states whose steps are all finished, as skipped steps are known then."""
        while self._pending_states and self._pending_states[0][0].step <= self._steps_done:
            state, pending = self._pending_states.pop(0)
            pending.set_result(msgspec.to_builtins(replace(state, skips=self.log.skips)))

    def _report_saves(self) -> None:
        """Call the callbacks for newly completed checkpoints."""
        if not self._unreported_saves or self.saver.is_busy:
            return
        saved_steps = self.saver.store.steps()
        for step in self._unreported_saves:
            for c in self._run.callbacks.active if step in saved_steps else ():
                c.after_save(step, self.saver.store.folder(step))
        self._unreported_saves = []
