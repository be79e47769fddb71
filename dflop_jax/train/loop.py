"""The steps of a run: feed, dispatch, log, save, evaluate, and stop when asked."""

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

import msgspec

from dflop_jax.config_fields import profiled_steps
from dflop_jax.data import Loader, Source, make_loader
from dflop_jax.distributed.hang_watch import Sections, TaskProgress
from dflop_jax.distributed.process_exit import RunFailed, preemption
from dflop_jax.distributed.processes import report_step
from dflop_jax.profile.needed import needed_flops
from dflop_jax.records import PriceList
from dflop_jax.report.run_folder import SAMPLES
from dflop_jax.report.wall_time import DATA, END, REDECISION, SAVE, TRAINING
from dflop_jax.runtime.step_result import StepHandle
from dflop_jax.schedule.buckets.extra_buckets import oversize_samples
from dflop_jax.schedule.correction import CorrectionState, price_changes
from dflop_jax.schedule.worker import ScheduleWorker, SolverSetup
from dflop_jax.train.callbacks import Evaluation, FitResult
from dflop_jax.train.choose_plan import ReadyRun
from dflop_jax.train.compile_cache import compiles_counted
from dflop_jax.train.correction import Corrector, take_up
from dflop_jax.train.evaluate import HeldOut
from dflop_jax.train.feed import Packer, ReadyBatch, Waits, feed, own_ranks
from dflop_jax.train.redecide import NewPlan, Redecider
from dflop_jax.train.resume import Meta, Resumed, planned_under, trained_under
from dflop_jax.train.skipped_samples import Skips
from dflop_jax.train.step_figures import row_tokens
from dflop_jax.train.step_log import StepLog
from dflop_jax.train.step_profile import StepProfiler
from dflop_jax.train.timing import count_program

FIRST_STEP = "first step"


class Loop:
    """One process's part in the steps of a run. It ends early where the plan is to be changed for
    the `next` one."""

    def __init__(self, ready: ReadyRun):
        place, ex = ready.place, ready.ex
        self._ready, self.config, self.peers, self.ex = ready, place.config, place.peers, ex
        self.saver, self.progress = ready.saver, ready.progress
        needed = needed_flops(place.model, row_tokens(ex.plan.layout), place.trained.frozen)
        self.packer = Packer(ex.plan, place.model, own_ranks(ex.programs), self.peers, needed)
        loader = partial(make_loader, self.config, ready.source, model=place.model)
        self.loader = loader(partial(oversize_samples, plan=ex.plan))
        self._corrector: Corrector | None = None
        self._redecider = Redecider(ready, loader().loads)  # before too large ones are replaced
        self.next: NewPlan | None = None
        self._held_out: HeldOut | None = None
        self._stalled_s = 0.0
        self._save_asked = False  # by process 0, as time goes
        self._stopped_by = ""
        # Of saves that await the end of their last steps, what is kept beside the state.
        self._unfinished: list[tuple[Meta, Future[Mapping[str, Any]]]] = []
        self._untold: list[int] = []  # steps whose saves callbacks are to be told of

    def run(self, stack: ExitStack, resumed: Resumed | None) -> FitResult:
        """Run the steps that are left, and save what they reached."""
        config, place = self.config, self._ready.place
        start, skips = 0, Skips()
        if resumed:
            start = self.loader.restore(resumed.meta.loader, config.data.changed)
            skips = resumed.meta.skips
        self._done = self._saved = start
        self._saved_s = time.monotonic()
        worker = self._start_worker(stack, start, resumed.meta.learnt if resumed else None)
        if self._ready.held_out is not None:
            self._held_out = HeldOut(self._ready, self.packer)
            self.saver.store.best = self._held_out.best[0]
        counter = stack.enter_context(compiles_counted())
        names = partial(sample_names, self._ready.source, self.loader)
        self.log = StepLog(self._ready, counter, self._corrector, skips, names)
        steps = range(start, config.train.steps)
        if resumed and steps and self._is_evaluation_due(start):
            self._evaluate(start)  # the run may have ended before it did
        batches = feed(self.loader, worker, self.packer, steps)
        with preemption(self.progress.log) as asked:
            place.time.go_on_with(TRAINING)
            pending_tasks = self.ex.pending_tasks
            place.sections.tasks = lambda: TaskProgress(*pending_tasks.progress())
            with closing(batches):
                preempted = self._steps(steps_marked(place.sections, batches, start), asked)
            place.sections.tasks = TaskProgress
            place.time.go_on_with(END)
            if self.next is not None:  # a signal may have come while it was searched
                preempted |= any(self.peers.all_gather("asked", asked.is_set(), bool))
            done = self._done
            with place.time.part(SAVE):
                if config.checkpoint.saves:
                    self._save(done)
                self.saver.wait()
            self._tell_saved()
        evaluation = None
        if self._held_out and not preempted and self.next is None:
            row = self._held_out.row
            evaluation = row if row and row.step == done else self._evaluate(done)
        self.log.write_trace()
        if n := self.log.n_unsupervised:
            self.progress.log(f"{n} of {done - start} steps had no supervised token")
        if preempted:
            saved = "continue with --resume auto" if config.checkpoint.saves else "nothing is saved"
            self.progress.log(f"preempted at step {done}; {saved}")
        elif self._stopped_by:
            self.progress.log(f"stopped after step {done}: {self._stopped_by}")
        if self.saver.trouble:
            raise RunFailed(
                f"what was trained is not saved: {self.saver.trouble}; make room, resume"
            )
        losses, compiles = tuple(self.log.losses), self.log.n_compiles
        run_dir, why = Path(config.run_dir), self._stopped_by
        return FitResult(run_dir, losses, evaluation, compiles, done, preempted, why)

    def _start_worker(
        self, stack: ExitStack, start: int, known: CorrectionState | None
    ) -> ScheduleWorker | None:
        """Start what solves the schedules, on process 0, and what corrects its prices; `known` is
        what a checkpoint knows of these."""
        folder, prices, config = self._ready.folder, self._ready.prices, self.config.schedule
        if folder is None:
            return None
        learnt, samples = None, folder.rows[SAMPLES]
        if config.correct:
            learnt = take_up(prices, known, samples, start)
        else:
            samples.keep(lambda sample: sample.step < start)
        plan = self.ex.plan
        program = count_program(plan, self.config.cache_dir)
        setup = SolverSetup(plan, tuple(self.ex.trainable), config.work or None, program)
        worker = stack.enter_context(
            ScheduleWorker(
                self.loader.loads,
                setup,
                prices,
                changes=price_changes(prices, learnt) if learnt else None,
                first_step=start,
                stop_step=self.config.train.steps,
                ahead=config.ahead,
            )
        )
        if learnt:
            self._corrector = Corrector(self._ready, worker, learnt)
        return worker

    def _steps(self, batches: Iterator[tuple[ReadyBatch, Waits]], asked: threading.Event) -> bool:
        """Whether a signal, or the time that the run has, cut the steps short."""
        pending: tuple[StepHandle, ReadyBatch, Waits] | None = None
        signalled = False

        def finish() -> None:
            nonlocal pending, signalled
            if pending is None:
                return
            handle, batch, waits = pending
            pending = None
            self.saver.check()
            waits = replace(waits, save_s=self.saver.stall_s - self._stalled_s)
            self._stalled_s = self.saver.stall_s
            over = time.monotonic() > self._ready.ends_s
            stops = asked.is_set() or over
            verdict = self.log.finish(handle, batch, waits, stops, self._is_due_to_save())
            if over and not signalled:
                self.progress.log(f"{self.config.train.max_hours:g} hours are over; saving")
            signalled |= verdict.stop
            self._stopped_by = self._stopped_by or verdict.stopped_by
            self._save_asked |= verdict.save
            self._done = batch.step + 1
            report_step()
            self._finish_saves()
            self._tell_saved()
            if self.log.end_reason:
                raise RunFailed(self.log.end_reason)

        def drain() -> None:
            finish()
            self.log.pause()

        with closing(self._profiler(drain)) as profiler:
            for batch, waits in batches:
                for c in self._ready.callbacks.called:
                    c.before_step(batch.step)
                limit = self.log.skips.norm_limit(batch.step, self.config.train.loss_spike)
                with profiler.dispatching(batch.step):
                    handle = self.ex.run_step(
                        batch.schedule, batch.groups, batch.loss.scales, norm_limit=limit
                    )
                # The step before is awaited only now, so that the devices never wait for the host.
                finish()
                pending = (handle, batch, waits)
                profiler.dispatched(batch.step)
                if signalled or self._stopped_by:
                    break
                self._after(batch.step + 1, drain)
                if self.next is not None or signalled or self._stopped_by:
                    break
            finish()
        return signalled and self._done < self.config.train.steps

    def _profiler(self, drain: Callable[[], None]) -> StepProfiler:
        """Return what traces the steps of `train.profile_steps` that are still to be done."""
        wanted = profiled_steps(self.config.train.profile_steps)
        steps = range(max(wanted.start, self._done), wanted.stop)
        if wanted and not steps:
            self.progress.log(
                f"train.profile_steps={self.config.train.profile_steps}: done before step "
                f"{self._done}, where this run goes on; nothing is traced"
            )
        run_dir, process = self.config.run_dir, self.peers.process_index
        return StepProfiler(steps, run_dir, process, drain, self.progress.log)

    def _after(self, done: int, drain: Callable[[], None]) -> None:
        """Do what is due after `done` steps."""
        if done == self.config.train.steps:
            return
        every, look = self.config.checkpoint.every, self.config.plan.redecide_every
        if self._save_asked or (every and done % every == 0):
            self._save(done)
        if self._is_evaluation_due(done):
            drain()
            self._evaluate(done)
        if look and done % look == 0:
            with self._ready.place.time.part(REDECISION):
                self.next = self._redecider.look(done, self.log.step_s[-look:])

    # ---- evaluations ----

    def _is_evaluation_due(self, done: int) -> bool:
        every = self.config.train.eval_every
        return bool(self._held_out and every and done % every == 0)

    def _evaluate(self, done: int) -> Evaluation:
        """Evaluate the state after `done` steps, all of them finished; the best one is saved."""
        held_out = self._held_out
        assert held_out is not None
        row = held_out.run(done)
        beats = self.config.checkpoint.keep_best and row.loss < held_out.best[1]
        if beats and self._is_saved_whole(done):
            held_out.best = done, row.loss
            self.saver.store.best = done
            self.progress.log("  the best so far: its checkpoint is kept")
        return row

    # ---- saves ----

    def _is_saved_whole(self, done: int) -> bool:
        """Save the state after `done` steps; whether it could be written."""
        self._save(done)
        self.saver.wait()
        return self.peers.broadcast(f"whole/{done}", done in self.saver.store.steps(), bool)

    def _is_due_to_save(self) -> bool:
        """Whether to save by time, for process 0; not while a save is under way, which the next one
        would wait for."""
        every_s = self.config.checkpoint.every_s
        since_s = time.monotonic() - self._saved_s
        return every_s > 0 and since_s >= every_s and not self.saver.is_busy

    def _save(self, done: int) -> None:
        """Begin to save the state after `done` steps, unless it is saved already."""
        self._save_asked = False
        if done == self._saved:
            return
        self._saved, self._saved_s = done, time.monotonic()
        ready, meta = self._ready, Future[Mapping[str, Any]]()
        known = Meta(
            done,
            self.loader.state(done),
            self.ex.plan,
            ready.profile,
            PriceList.of(ready.prices),
            planned_under(ready.place) if self.peers.is_primary else {},
            self._corrector.learnt(done) if self._corrector else None,
            trained_under=trained_under(self.config),
        )
        self._unfinished.append((known, meta))
        self._finish_saves()
        self.saver.save(done, meta)
        if ready.callbacks.called:
            self._untold.append(done)

    def _finish_saves(self) -> None:
        """Complete what is kept of states whose steps are all finished: only then is known which
        updates were skipped."""
        while self._unfinished and self._unfinished[0][0].step <= self._done:
            known, meta = self._unfinished.pop(0)
            meta.set_result(msgspec.to_builtins(replace(known, skips=self.log.skips)))

    def _tell_saved(self) -> None:
        """Tell callbacks of checkpoints that have become whole."""
        if not self._untold or self.saver.is_busy:
            return
        begun, self._untold = self._untold, []
        whole = self.saver.store.steps()
        for step in (s for s in begun if s in whole):
            for c in self._ready.callbacks.called:
                c.after_save(step, self.saver.store.folder(step))


def steps_marked(
    sections: Sections, batches: Iterator[tuple[ReadyBatch, Waits]], first: int
) -> Iterator[tuple[ReadyBatch, Waits]]:
    """The batches; what is done between two of them is a step, waiting for one is a section of its
    own."""
    step = first
    while True:
        sections.begin(DATA)
        batch = next(batches, None)
        # What lies between two steps ends with the wait for the one before; the first has none.
        sections.begin(TRAINING if step > first else FIRST_STEP, step)
        if batch is None:
            return
        yield batch
        step += 1


def sample_names(source: Source, loader: Loader, step: int) -> list[str]:
    """The samples of a step's batch, by name. No method: who keeps it would keep the loop, and so
    the executor's arrays."""
    return [source.label(i) for i in loader.indices(step)]
