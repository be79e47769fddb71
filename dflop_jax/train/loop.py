"""The steps of a run: feed, dispatch, log, save, evaluate, and stop when asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from dflop_jax.cluster.ending import RunFailed, preemption
from dflop_jax.cluster.supervised import report_step
from dflop_jax.config_fields import profiled_steps
from dflop_jax.data import Loader, Source, make_loader
from dflop_jax.pipeline.step_result import StepHandle
from dflop_jax.profile.needed import needed_flops
from dflop_jax.records import PriceList
from dflop_jax.report.spent import END, REDECISION, SAVE, TRAINING
from dflop_jax.schedule.learnt import Learnt, price_changes
from dflop_jax.schedule.shapes.spare import beyond
from dflop_jax.schedule.worker import ScheduleWorker
from dflop_jax.schedule.worker_main import SolverSetup
from dflop_jax.train.compiles import CompileCounter
from dflop_jax.train.correct import Corrector, take_up
from dflop_jax.train.count_programs import count_program
from dflop_jax.train.evaluations import Evaluations
from dflop_jax.train.feed import Packer, ReadyBatch, Schedules, Waits, feed, own_ranks
from dflop_jax.train.meta import Meta, planned_under, trained_under
from dflop_jax.train.ready import ReadyRun
from dflop_jax.train.redecide import NewPlan, Redecider
from dflop_jax.train.results import LoopResult
from dflop_jax.train.resume import Resumed
from dflop_jax.train.saves import Saves, best_so_far
from dflop_jax.train.skips import Skipping, Skips
from dflop_jax.train.step_log import RowFacts, StepLog
from dflop_jax.train.step_profile import StepProfiler
from dflop_jax.train.utilisation import Peaks, row_tokens
from dflop_jax.train.watched import steps_marked, tasks_shown


class Loop:
    """One process's part in the steps of a run. It ends early where the plan is to be changed
    (`redecider`)."""

    def __init__(self, ready: ReadyRun):
        config, place, ex = ready.config, ready.place, ready.ex
        self._ready, self.config, self.peers, self.ex = ready, config, place.peers, ex
        self.saver, self.folder, self.progress = ready.saver, ready.folder, ready.progress
        needed = needed_flops(place.model, row_tokens(ex.plan.layout), place.trained.frozen)
        self.packer = Packer(ex.plan, place.model, own_ranks(ex.programs), self.peers, needed)
        loader = partial(make_loader, config, ready.source, model=place.model)
        self.loader = loader(partial(beyond, plan=ex.plan))
        self._corrector: Corrector | None = None
        asked_for = loader().loads  # before what is too large is replaced
        self._redecider = Redecider(
            place, ready.profile, ex.plan, asked_for, ready.start_s, ready.progress
        )
        self._next: NewPlan | None = None
        self._stalled_s = 0.0
        self._save_asked = False  # by process 0, as time goes
        self._stopped_by = ""
        self._untold: list[int] = []  # steps whose saves callbacks are to be told of

    def run(self, stack: ExitStack, resumed: Resumed | None) -> LoopResult:
        """Run the steps that are left, and save what they reached."""
        config, peers = self.config, self.peers
        start = 0
        if resumed:
            start = self.loader.restore(resumed.meta.loader, config.data.changed)
        self._done = start
        known = resumed.meta.skips if resumed else Skips()
        names = partial(sample_names, self._ready.source, self.loader)
        self._skipping = Skipping(config.train, names, known)
        best = best_so_far(config.checkpoint, self.folder, self.saver, peers)
        self._saves = Saves(self.saver, start, best)
        self._saved_s = time.monotonic()
        worker = self._start_worker(stack, start, resumed.meta.learnt if resumed else None)
        evaluations = None
        if self._ready.held_out is not None:
            evaluations = Evaluations(self._ready, self.packer)
        counter = CompileCounter()
        stack.callback(counter.close)
        place = self._ready.place
        facts = RowFacts(
            config.train,
            self.ex.plan,
            peers,
            place.trained.rates,
            Peaks.of(config, self.ex.plan.layout, place.devices),
            place.time,
            self._ready.callbacks,
            place.devices,
        )
        self.log = StepLog(
            facts, self.folder, self.progress, counter, self._corrector, self._skipping
        )
        steps = range(start, config.train.steps)
        if evaluations and resumed and steps and evaluations.is_due(start):
            # The run may have ended before it did.
            evaluations.run(start, self._saves, self._checkpoint)
        batches = feed(self.loader, Schedules(peers, worker), self.packer, steps)
        with preemption(self.progress.log) as asked:
            place.time.go_on_with(TRAINING)
            with closing(batches), tasks_shown(place.sections, self.ex):
                marked = steps_marked(place.sections, batches, start)
                preempted = self._steps(marked, evaluations, asked)
            place.time.go_on_with(END)
            if self._next is not None:  # a signal may have come while it was searched
                preempted |= bool(self.peers.first_text("asked", "x" if asked.is_set() else ""))
            done = self._done
            with place.time.part(SAVE):
                if config.checkpoint.saves:
                    self._save(done)
                self.saver.wait()
            self._tell_saved()
        evaluation = None
        if evaluations and not preempted and self._next is None:
            evaluation = evaluations.at_end(done, self._saves, self._checkpoint)
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
        losses, compiles = tuple(self.log.losses), tuple(self.log.compiles)
        more = self._next, self._stopped_by
        return LoopResult(losses, compiles, evaluation, done, preempted, self.ex.plan, *more)

    def _start_worker(
        self, stack: ExitStack, start: int, known: Learnt | None
    ) -> ScheduleWorker | None:
        """Start what solves the schedules, on process 0, and what corrects its prices; `known` is
        what a checkpoint knows of these."""
        samples, prices = self._ready.samples, self._ready.prices
        if samples is None:
            return None
        learnt = None
        if self.config.schedule.correct:
            learnt = take_up(prices, known, samples, start)
        else:
            samples.keep(lambda sample: sample.step < start)
        plan = self.ex.plan
        program = count_program(plan, self.config.cache_dir)
        work = self.config.schedule.work or None
        setup = SolverSetup(plan, tuple(self.ex.trainable), work, program)
        worker = stack.enter_context(
            ScheduleWorker(
                self.loader.loads,
                setup,
                prices,
                changes=price_changes(prices, learnt) if learnt else None,
                first_step=start,
                stop_step=self.config.train.steps,
                ahead=self.config.schedule.ahead,
            )
        )
        if learnt:
            self._corrector = Corrector(
                plan,
                prices,
                self.ex.trainable,
                worker,
                samples,
                self.progress,
                learnt,
            )
        return worker

    def _steps(
        self,
        batches: Iterator[tuple[ReadyBatch, Waits]],
        evaluations: Evaluations | None,
        asked: threading.Event,
    ) -> bool:
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
            self._saves.tell(self._done, self._skipping.known)
            self._tell_saved()
            if self.folder and (why := self._skipping.end_reason()):
                raise RunFailed(why)

        def drain() -> None:
            finish()
            self.log.pause()

        with closing(self._profiler(drain)) as profiler:
            for batch, waits in batches:
                self._ready.callbacks.before_step(batch.step)
                with profiler.dispatching(batch.step):
                    handle = self.ex.run_step(
                        batch.schedule,
                        batch.groups,
                        batch.loss.scales,
                        norm_limit=self._skipping.norm_limit(batch.step),
                    )
                # The step before is awaited only now, so that the devices never wait for the host.
                finish()
                pending = (handle, batch, waits)
                profiler.dispatched(batch.step)
                if signalled or self._stopped_by:
                    break
                self._after(batch.step + 1, evaluations, finish)
                if self._next is not None or signalled or self._stopped_by:
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
        return StepProfiler(
            steps, self.config.run_dir, self.peers.process, drain, self.progress.log
        )

    def _after(
        self, done: int, evaluations: Evaluations | None, finish: Callable[[], None]
    ) -> None:
        """Do what is due after `done` steps."""
        every = self.config.checkpoint.every
        last = done == self.config.train.steps
        by_steps = every > 0 and done % every == 0
        if (by_steps or self._save_asked) and not last:
            self._save(done)
        if evaluations and evaluations.is_due(done) and not last:
            finish()
            evaluations.run(done, self._saves, self._checkpoint)
            self.log.pause()
        if (look := self.config.plan.redecide_every) and done % look == 0 and not last:
            with self._ready.place.time.part(REDECISION):
                self._next = self._redecider.look(done, self.log.step_s[-look:])

    def _checkpoint(self, done: int) -> Path | None:
        """The checkpoint after `done` steps, made whole; None where it cannot be written."""
        self._save(done)
        self.saver.wait()
        there = b"x" * (done in self.saver.steps()) if self.peers.is_hub else None
        if not self.peers.broadcast(f"whole/{done}", there):
            return None
        return self.saver.folder_of(done)

    def _tell_saved(self) -> None:
        """Tell callbacks of checkpoints that have become whole."""
        if not self._untold or self.saver.is_busy:
            return
        begun, self._untold = self._untold, []
        whole = self.saver.steps()
        for step in begun:
            if step in whole:
                self._ready.callbacks.after_save(step, self.saver.folder_of(step))

    def _is_due_to_save(self) -> bool:
        """Whether to save by time, for process 0; not while a save is under way, which the next one
        would wait for."""
        every_s = self.config.checkpoint.every_s
        since_s = time.monotonic() - self._saved_s
        return every_s > 0 and since_s >= every_s and not self.saver.is_busy

    def _save(self, done: int) -> None:
        """Begin to save the state after `done` steps, unless it is saved already."""
        self._save_asked = False
        if done == self._saves.saved:
            return
        self._saved_s = time.monotonic()
        self._saves.begin(self._meta(done), self._done, self._skipping.known)
        if self._ready.callbacks:
            self._untold.append(done)

    def _meta(self, done: int) -> Meta:
        """What is kept beside the state after `done` steps."""
        ready = self._ready
        return Meta(
            done,
            self.loader.state(done),
            self.ex.plan,
            ready.profile,
            PriceList.of(ready.prices),
            planned_under(ready.place) if self.peers.is_hub else {},
            self._corrector.learnt(done) if self._corrector else None,
            trained_under=trained_under(self.config),
        )


def sample_names(source: Source, loader: Loader, step: int) -> list[str]:
    """The samples of a step's batch, by name."""
    return [source.label(i) for i in loader.indices(step)]
