"""Trains a model under a plan: profile -> plan -> compile -> calibrate -> steps -> report.

With several processes each runs all of this; process 0 decides what the others are then sent: the
profile, the plan, the schedules, and when to stop.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax

from dflop_jax.checkpoint.checkpointer import Checkpointer
from dflop_jax.config import Config
from dflop_jax.data import Source, make_loader
from dflop_jax.distributed.hang_watch import HangWatch
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.distributed.process_exit import TransientError, exit_code_of, is_cli_process
from dflop_jax.distributed.processes import is_restart, launch_name
from dflop_jax.folders import tolerate_full_disk
from dflop_jax.records import Plan, Profile
from dflop_jax.report.progress import Progress
from dflop_jax.report.run_folder import (
    CHECKPOINTS,
    CORRECTIONS,
    HUNG,
    SUMMARY,
    FolderInUse,
    RunFolder,
)
from dflop_jax.report.run_folder import PLAN as PLAN_FILE
from dflop_jax.report.summary import write_summary
from dflop_jax.report.trackers import check_trackers, open_trackers
from dflop_jax.report.wall_time import EVENTS, REDECISION, SAVE, START
from dflop_jax.train.callbacks import Callback, Callbacks, FitResult
from dflop_jax.train.choose_plan import (
    PlannedRun,
    check_same_config,
    choose_plan,
    describe_context,
    describe_data,
    describe_remaining_time,
    predict_plan,
)
from dflop_jax.train.correction import read_samples
from dflop_jax.train.initial_params import make_initializer, warn_unexportable_adapters
from dflop_jax.train.loop import TrainLoop
from dflop_jax.train.plan_trials import (
    REPEATS,
    compile_and_time,
    make_executor,
    translate_memory_errors,
)
from dflop_jax.train.planning import check_held_out, check_trainable
from dflop_jax.train.profiling import check_not_empty
from dflop_jax.train.redecide import NewPlan
from dflop_jax.train.resume import Resume, Resumed, changed_flags, find_checkpoint, restore
from dflop_jax.train.run_context import RunContext, make_run_context, with_step_count
from dflop_jax.train.run_dir import belongs_to_launch

log = logging.getLogger("dflop_jax")
Existing = Literal["error", "overwrite", "resume"]


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
      TransientError: the processes do not find each other.
    """

    def __init__(
        self,
        config: Config,
        *,
        plan: Plan | None = None,
        profile: Profile | None = None,
        existing: Existing | Resume = "error",
        callbacks: Sequence[Callback] = (),
        dry: bool = False,
        on_line: Callable[[str, bool], None] = lambda line, ready: None,
    ):
        resume = existing if isinstance(existing, Resume) else Resume()
        self._resume = Resume() if is_restart() else resume  # of the first start
        self._existing: Existing = "resume" if isinstance(existing, Resume) else existing
        self._dry = dry
        hours = config.train.max_hours
        self._ends_s = time.monotonic() + 3600 * hours if hours else math.inf
        check_trainable(config)
        self.context: RunContext = make_run_context(config, resume=self._existing == "resume")
        self.peers = self.context.peers
        self._callbacks = Callbacks(callbacks, is_process_0=self.peers.is_primary)
        with self._broadcast_errors():
            self._on_line = on_line if self.peers.is_primary else lambda line, ready: None
            if not is_restart():  # the first start told it, and counting parameters takes a second
                self._on_line(describe_context(self.context), False)
            self._initializer = make_initializer(self.context.model, config.model.weights)
            if self.peers.is_primary:
                check_trackers(config)
                warn_unexportable_adapters(config, self.context.model)
            self.source: Source = self.context.source()
            check_not_empty(self.source)
            self._requested_batch = config.train.global_batch
            self.context = with_step_count(self.context, len(self.source))
            self.config = config = self.context.config
            check_trainable(config)
            self._held_out: Source | None = None
            if config.train.evaluates:
                self._held_out = self.context.source("eval")
                check_held_out(config, self._held_out)
            self.profile = profile
            self._given_executor = make_executor(self.context, plan) if plan else None

    @contextmanager
    def _broadcast_errors(self) -> Iterator[None]:
        """Tell all processes of an error, so that none waits for this one."""
        try:
            yield
        except BaseException as e:
            broadcast_error(self.peers, e)
            raise

    def fit(self) -> FitResult:
        """Train to the last step and write the run folder. SIGINT, SIGTERM or SIGHUP save and end
        it earlier, a second one ends the process.

        Raises:
          ValueError: the folder holds another run or its checkpoint is of another model, no plan
            fits, or too many samples are bad.
          TransientError: another run writes to the folder.
        """
        losses: dict[int, float] = {}  # by step, each as it was run last
        n_compiles = 0
        with self._broadcast_errors(), watch_for_hangs(self.context):
            while True:
                # Told before anything is cleaned up, which may wait for what the others compute.
                with ExitStack() as stack, self._broadcast_errors():
                    result, new_plan = self._fit_plan(stack)
                losses |= enumerate(result.losses, result.steps_done - len(result.losses))
                n_compiles += result.compiles_after_warmup
                if result.preempted or new_plan is None:
                    break
                self.context.time_log.switch_to(REDECISION)
                self._existing, self.profile = "resume", new_plan.profile
                self._given_executor = make_executor(self.context, new_plan.plan)
            ordered_losses = tuple(losses[step] for step in sorted(losses))
            result = replace(result, losses=ordered_losses, compiles_after_warmup=n_compiles)
            for c in self._callbacks.active:
                c.at_end(result)
        return result

    def _fit_plan(self, stack: ExitStack) -> tuple[FitResult, NewPlan | None]:
        """Train under one plan, to the last step or until another plan pays."""
        config, peers, time_log = self.config, self.peers, self.context.time_log
        peers.begin_run()
        check_same_config(config, peers)
        checkpoints = Path(config.run_dir) / CHECKPOINTS
        if is_restarted_run(config.run_dir, peers):
            self._existing = "resume"
        asked, self._resume = self._resume, Resume()
        given, self._given_executor = self._given_executor, None
        resumed = None
        if self._existing == "resume":
            resumed = find_checkpoint(checkpoints, peers, at=asked.at)
        # Before anything is written: the folder may be of a run on other data.
        loader, start = make_loader(config, self.source), 0
        if resumed:
            start = loader.restore(resumed.state.loader, config.data.changed)
        folder = None
        if peers.is_primary:
            folder = stack.enter_context(open_run_folder(config.run_dir, self._existing))
            stack.callback(time_log.finish_writing)
            for _ in read_samples(folder.rows[CORRECTIONS]):
                pass  # a broken line is refused
            if not resumed:
                time_log.write_to(folder.rows[EVENTS])
        steps, every, quiet = config.train.steps, config.train.log_every, not peers.is_primary
        progress = stack.enter_context(Progress(steps, start, log_interval=every, quiet=quiet))
        begun_s = time.perf_counter()
        meta = resumed.state if resumed else None
        chosen = choose_plan(
            self.context, self.source, meta, given, self.profile, progress, self._report_data
        )
        ex, self.profile = chosen.executor, chosen.profile
        stack.callback(ex.close)
        saves, waiting = config.checkpoint, partial(self.context.sections.within, SAVE)
        saver = Checkpointer(
            checkpoints, ex, peers, keep=saves.keep, keep_every=saves.keep_every, waiting=waiting
        )
        placing_s = time.perf_counter()
        with translate_memory_errors(peers, ex.plan, "placing its parameters"):
            if resumed:
                ex.init_for_restore()
                reset = asked.reset_optimizer
                resumed = restore(saver, resumed, peers, reset_optimizer=reset)
            else:
                ex.init(config.train.seed, self._initializer)
        first_step = resumed.state.step if resumed else 0
        if first_step < start:
            progress.restart(first_step)
        if resumed:
            says = f"resumed after step {first_step} of {config.train.steps}"
            progress.log(f"{says}, read in {time.perf_counter() - placing_s:.1f} s")
            if changed := changed_flags(resumed.state, config):
                progress.log(f"resumed with {changed}")
        if folder:  # only now it is clear that the folder is of this run
            self._start_writing(folder, resumed, chosen.profile)
        # The plan's figures are in the folder then, and nothing else asks for times.
        as_it_was = resumed is not None and resumed.state.plan == ex.plan
        untimed = peers.broadcast("untimed", as_it_was, bool)
        timed = chosen.timed
        if timed is None:
            compiling_s = time.perf_counter()
            timed = compile_and_time(self.context, ex, repeats=0 if untimed else REPEATS)
            took_s = time.perf_counter() - compiling_s
            found = f", {timed.n_found} of them from the cache" * bool(timed.n_found)
            progress.log(f"compiled {timed.n_programs} programs in {took_s:.1f} s{found}")
        if folder:
            plan = ex.plan
            if not untimed:
                plan = predict_plan(self.context, chosen.profile, chosen.prices, timed)
            if not (as_it_was and (folder.path / PLAN_FILE).exists()):
                folder.write_plan(plan)
            progress.log(describe_remaining_time(plan, config.train.steps - first_step))
        if self._dry:
            peers.barrier("dry")
            return FitResult(Path(config.run_dir), (), None, 0, first_step, False), None
        start_s = time.perf_counter() - begun_s
        loop = TrainLoop(
            PlannedRun(
                self.context,
                self.source,
                self._held_out,
                chosen.profile,
                ex,
                chosen.prices,
                saver,
                folder,
                progress,
                start_s,
                self._ends_s,
                self._callbacks,
            )
        )
        result = loop.run(stack, resumed)
        if folder and result.losses:
            with tolerate_full_disk(folder.path / SUMMARY):
                write_summary(folder.path)
        peers.barrier("done")
        return result, loop.next_plan

    def _report_data(self) -> None:
        self._on_line(describe_data(self.source, self.config.train, self._requested_batch), True)
        self._on_line = lambda line, ready: None  # once, also where plans change

    def _start_writing(self, folder: RunFolder, resumed: Resumed | None, profile: Profile) -> None:
        """Begin to write to a folder, after the step that it is resumed from."""
        config, first_step = self.config, resumed.state.step if resumed else 0
        if self._existing == "resume":
            folder.restart(first_step)
        if resumed:
            self.context.time_log.write_to(folder.rows[EVENTS])
        self.context.time_log.resumed(first_step)
        folder.trackers = open_trackers(config, folder.path, first_step)
        folder.tracking_interval = config.train.log_every or 1
        folder.write_config(config)
        folder.write_profile(profile)


def watch_for_hangs(context: RunContext) -> AbstractContextManager[Any]:
    """Every section of a run has its deadline in here (see `distributed.hang_watch`). One process
    that no command of ours runs (a script, a notebook, a debugger) is not ended: what hangs is said
    and written."""
    settings = context.config.distributed
    if not settings.hang_factor:
        return nullcontext()
    context.sections.begin(START)
    ends = context.peers.n_processes > 1 or is_cli_process.is_set()
    folder, end = Path(context.config.run_dir, HUNG), None if ends else log.error
    return HangWatch(
        context.sections, context.peers, folder, min_deadline_s=settings.hang_least_s, end_run=end
    )


def is_restarted_run(run_dir: str, peers: ProcessGroup) -> bool:
    """Whether this is a restart of a run that its launch has begun in this folder before. A script
    may train in several folders: others may hold older runs, which are not to be resumed. Process
    0, which writes there, says so to all."""
    return peers.broadcast("begun", is_restart() and belongs_to_launch(run_dir), bool)


def open_run_folder(run_dir: str, existing: Existing) -> RunFolder:
    """Process 0's run folder.

    Raises:
      TransientError: another run writes to it.
      ValueError: see `RunFolder`.
    """
    try:
        return RunFolder(run_dir, existing=existing, launch=launch_name())
    except FolderInUse as e:
        raise TransientError(str(e)) from None


def broadcast_error(peers: ProcessGroup, error: BaseException) -> None:
    """Tell all processes that this one stops by an error."""
    if isinstance(error, jax.errors.JaxRuntimeError):  # which a lost process causes as well
        peers.wait_for_peer_loss()
    message = " ".join(str(error).split()) or type(error).__name__
    peers.fail(f"process {peers.process_index} stopped: {message}", exit_code_of(error))
