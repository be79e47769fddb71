"""Trains a model under a plan: profile -> plan -> compile -> calibrate -> steps -> report.

With several processes each runs all of this; process 0 decides what the others are then sent: the
profile, the plan, the schedules, and when to stop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

from dflop_jax.checkpoint.checkpointer import Checkpointer
from dflop_jax.cluster.supervised import is_restart
from dflop_jax.config import Config
from dflop_jax.data import Source, make_loader
from dflop_jax.folders import despite_full_disk
from dflop_jax.pipeline.executor import Executor
from dflop_jax.records import AXES, Plan, Profile
from dflop_jax.report.progress import Progress
from dflop_jax.report.run_folder import CHECKPOINTS, SAMPLES, SUMMARY, RunFolder
from dflop_jax.report.run_folder import PLAN as PLAN_FILE
from dflop_jax.report.spent import EVENTS, REDECISION, SAVE
from dflop_jax.report.summary import write_summary
from dflop_jax.report.trackers import check_trackers, open_trackers
from dflop_jax.train.callbacks import Callback, Callbacks
from dflop_jax.train.choice import Chosen, choose, known_before
from dflop_jax.train.exports import warn_of_adapters
from dflop_jax.train.initial import published
from dflop_jax.train.loop import Loop
from dflop_jax.train.meta import changed_flags
from dflop_jax.train.planning import (
    check_held_out,
    check_trainable,
)
from dflop_jax.train.prepare import Workplace, in_steps, set_up
from dflop_jax.train.profiling import check_not_empty
from dflop_jax.train.ready import (
    ReadyRun,
    agree,
    data_line,
    expected,
    predicted,
    refuse,
    workplace_line,
)
from dflop_jax.train.restart import is_begun, open_folder, tell_others
from dflop_jax.train.results import FitResult, LoopResult, fit_result
from dflop_jax.train.resume import Resume, Resumed, find_checkpoint, restore
from dflop_jax.train.sample_file import SampleFile
from dflop_jax.train.timing import REPEATS, Timed, compile_and_time, make_executor
from dflop_jax.train.trying import plan_words, said_in_a_line
from dflop_jax.train.watched import watched


class Trainer:
    """A run of a configuration.

    Args:
      config: what to train.
      plan, profile: made from the configuration when not given.
      existing: what to do with another run in the folder: "error", "overwrite", or "resume" it
        from its newest whole checkpoint (from the start if it has none), or as a `Resume` says. A
        run that `dflop launch` starts again is resumed, whatever this says.
      callbacks: are told of steps, evaluations, saves and the end; see `callbacks.Callback`.
      dry: end before the first step, once what is expected is said; a folder made for it goes.
      tell: is told on process 0, a line each, of devices and model, and then of the data; and
        whether all is checked that can be without measuring.

    Raises:
      ValueError: the model cannot be built, the data cannot be read, too few devices exist, or the
        given plan is for another model.
      TryAgain: the processes do not find each other.
    """

    def __init__(
        self,
        config: Config,
        *,
        plan: Plan | None = None,
        profile: Profile | None = None,
        existing: Literal["error", "overwrite", "resume"] | Resume = "error",
        callbacks: Sequence[Callback] = (),
        dry: bool = False,
        tell: Callable[[str, bool], None] = lambda line, ready: None,
    ):
        said = existing if isinstance(existing, Resume) else Resume()
        self._resume = Resume() if is_restart() else said  # of the first start
        self._existing: Literal["error", "overwrite", "resume"]
        self._existing = "resume" if isinstance(existing, Resume) else existing
        self._dry = dry
        hours = config.train.max_hours
        self._ends_s = time.monotonic() + 3600 * hours if hours else math.inf
        check_trainable(config)
        self.place: Workplace = set_up(config, resume=self._existing == "resume")
        self.peers = self.place.peers
        self._callbacks = Callbacks(callbacks, is_first=self.peers.is_hub)
        with self._told_to_others():
            self._tell = tell if self.peers.is_hub else lambda line, ready: None
            if not is_restart():  # the first start told it, and counting parameters takes a second
                self._tell(workplace_line(self.place), False)
            self._begin = published(self.place.model, config.model.weights)
            if self.peers.is_hub:
                check_trackers(config)
                warn_of_adapters(config, self.place.model)
            self.source: Source = self.place.source()
            check_not_empty(self.source)
            self._asked_batch = config.train.global_batch
            self.place = in_steps(self.place, len(self.source))
            self.config = config = self.place.config
            check_trainable(config)
            self._held_out: Source | None = None
            if config.train.evaluates:
                self._held_out = self.place.source("eval")
                check_held_out(config, self._held_out)
            self.profile = profile
            self._given = make_executor(self.place, plan) if plan else None

    @contextmanager
    def _told_to_others(self) -> Iterator[None]:
        """Tell all processes of an error, so that none waits for this one."""
        try:
            yield
        except BaseException as e:
            tell_others(self.peers, e)
            raise

    def fit(self) -> FitResult:
        """Train to the last step and write the run folder. SIGINT, SIGTERM or SIGHUP save and end
        it earlier, a second one ends the process.

        Raises:
          ValueError: the folder holds another run or its checkpoint is of another model, no plan
            fits, or too many samples are bad.
          TryAgain: another run writes to the folder.
        """
        results: list[LoopResult] = []
        with self._told_to_others(), watched(self.place):
            while True:
                # Told before anything is cleaned up, which may wait for what the others compute.
                with ExitStack() as stack, self._told_to_others():
                    results.append(self._fit(stack))
                new = results[-1].next
                if results[-1].preempted or new is None:
                    break
                self.place.time.go_on_with(REDECISION)
                self._existing, self.profile = "resume", new.profile
                self._given = make_executor(self.place, new.plan)
            result = fit_result(self.config.run_dir, results)
            self._callbacks.at_end(result)
        return result

    def _fit(self, stack: ExitStack) -> LoopResult:
        """Train under one plan, to the last step or until another plan pays."""
        config, peers = self.config, self.peers
        peers.new_run()
        agree(config, peers)
        checkpoints = Path(config.run_dir) / CHECKPOINTS
        if is_begun(config.run_dir, peers):
            self._existing = "resume"
        asked, self._resume = self._resume, Resume()
        given, self._given = self._given, None
        resumed = None
        if self._existing == "resume":
            resumed = find_checkpoint(checkpoints, peers, at=asked.at)
        # Before anything is written: the folder may be of a run on other data.
        loader, start = make_loader(config, self.source), 0
        if resumed:
            start = loader.restore(resumed.meta.loader, config.data.changed)
        folder, samples = None, None
        if peers.is_hub:
            folder = stack.enter_context(open_folder(config.run_dir, self._existing))
            stack.callback(self.place.time.stop_writing)
            samples = SampleFile(folder.rows[SAMPLES])
            if not resumed:
                self.place.time.write_to(folder.rows[EVENTS])
        steps, every, quiet = config.train.steps, config.train.log_every, not peers.is_hub
        progress = stack.enter_context(Progress(steps, start, every=every, quiet=quiet))
        begun_s = time.perf_counter()
        chosen = self._choose(resumed, given, progress)
        ex, prices, self.profile = chosen.executor, chosen.prices, chosen.profile
        stack.callback(ex.close)
        saver = self._saver(checkpoints, ex)
        placing_s = time.perf_counter()
        resumed = self._place_state(ex, saver, resumed, reset_optimizer=asked.reset_optimizer)
        first_step = resumed.meta.step if resumed else 0
        if first_step < start:
            progress.restart(first_step)
        if resumed:
            took_s = time.perf_counter() - placing_s
            progress.log(f"{resumed.says(config.train.steps)}, read in {took_s:.1f} s")
            if changed := changed_flags(resumed.meta, config):
                progress.log(f"resumed with {changed}")
        if folder:  # only now it is clear that the folder is of this run
            self._take_over(folder, resumed, chosen.profile)
        # The plan's figures are in the folder then, and nothing else asks for times.
        as_it_was = resumed is not None and resumed.meta.plan == ex.plan
        untimed = peers.broadcast("untimed", b"1" * as_it_was if peers.is_hub else None) == b"1"
        timed = chosen.timed or self._warm_up(ex, progress, repeats=0 if untimed else REPEATS)
        if folder:
            made = ex.plan if untimed else predicted(self.place, chosen.profile, prices, timed)
            if not (as_it_was and (folder.path / PLAN_FILE).exists()):
                folder.write_plan(made)
            progress.log(expected(made, config.train.steps - first_step))
        if self._dry:
            peers.barrier("dry")
            return LoopResult((), (), None, first_step, False, ex.plan)
        data = self.source, self._held_out, chosen.profile
        more = time.perf_counter() - begun_s, self._ends_s, self._callbacks
        ready = ReadyRun(
            config, self.place, *data, ex, prices, saver, folder, samples, progress, *more
        )
        result = Loop(ready).run(stack, resumed)
        if folder and result.losses:
            with despite_full_disk(folder.path / SUMMARY):
                write_summary(folder.path)
        peers.barrier("done")
        return result

    # ---- before the first step ----

    def _place_state(
        self,
        ex: Executor,
        saver: Checkpointer,
        resumed: Resumed | None,
        *,
        reset_optimizer: bool,
    ) -> Resumed | None:
        """Give the executor its parameters and optimizer state, fresh or of a checkpoint; returns
        the one that was whole."""
        with said_in_a_line(self.peers, ex.plan, "placing its parameters"):
            if resumed is not None:
                ex.init_for_restore()
                return restore(saver, resumed, self.peers, reset_optimizer=reset_optimizer)
            ex.init(self.config.train.seed, self._begin)
            return None

    def _choose(
        self, resumed: Resumed | None, given: Executor | None, progress: Progress
    ) -> Chosen:
        """The plan to train under, once nothing speaks against it that is known unmeasured."""
        meta, plan = resumed.meta if resumed else None, given.plan if given else None
        known = known_before(self.place, meta, plan, self.profile, progress.log)
        refuse(self.place, self.source, known.profile, known.plan)
        self._tell(data_line(self.source, self.config.train, self._asked_batch), True)
        self._tell = lambda line, ready: None  # once, also where plans change
        chosen = choose(self.place, self.source, known, given, progress)
        layout = chosen.executor.plan.layout
        progress.log(
            f"plan {plan_words(chosen.executor.plan)} ({' x '.join(AXES)})"
            + (f"; up to {layout.fan_in} groups feed one" if layout.fan_in > 1 else "")
        )
        return chosen

    def _saver(self, checkpoints: Path, ex: Executor) -> Checkpointer:
        saves = self.config.checkpoint
        return Checkpointer(
            checkpoints,
            ex,
            self.peers,
            keep=saves.keep,
            keep_every=saves.keep_every,
            waiting=partial(self.place.sections.within, SAVE),
        )

    def _take_over(self, folder: RunFolder, resumed: Resumed | None, profile: Profile) -> None:
        """Begin to write to a folder, after the step that it is resumed from."""
        config, first_step = self.config, resumed.meta.step if resumed else 0
        if self._existing == "resume":
            folder.restart(first_step)
        if resumed:
            self.place.time.write_to(folder.rows[EVENTS])
        self.place.time.resumed(first_step)
        folder.trackers = open_trackers(config, folder.path, first_step)
        folder.track_every = config.train.log_every or 1
        folder.write_config(config)
        folder.write_profile(profile)

    def _warm_up(self, ex: Executor, progress: Progress, repeats: int) -> Timed:
        """Compile everything, run it once and time it, all processes together."""
        start_s = time.perf_counter()
        timed = compile_and_time(self.place, ex, repeats=repeats)
        progress.log(timed.says(time.perf_counter() - start_s))
        return timed
