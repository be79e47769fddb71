"""Trains a model under a plan: profile -> plan -> compile -> calibrate -> steps -> report.

Every process runs all of this; process 0 decides and sends profile, plan, schedules and the end.
"""

from __future__ import annotations

import gc
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
from dflop_jax.checkpoint.store import CheckpointReader
from dflop_jax.config import Config
from dflop_jax.data import Source, make_loader
from dflop_jax.distributed.hang_watch import HangWatch
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.distributed.process_exit import TransientError, exit_code_of, is_cli_process
from dflop_jax.distributed.processes import is_restart, launch_name
from dflop_jax.folders import tolerate_full_disk
from dflop_jax.plan.time_plans import MemoryShortage, PlanTooLarge
from dflop_jax.records import Plan, Profile
from dflop_jax.report import run_folder
from dflop_jax.report.progress import Progress
from dflop_jax.report.run_folder import RunFolder
from dflop_jax.report.summary import write_summary
from dflop_jax.report.trackers import check_trackers, open_trackers
from dflop_jax.report.wall_time import EVENTS, REDECISION, SAVE, START
from dflop_jax.runtime.executor import Executor
from dflop_jax.train import plan_timer
from dflop_jax.train.callbacks import Callback, Callbacks, FitResult
from dflop_jax.train.change_plan import Handover, move_run
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
from dflop_jax.train.load_params import make_initializer, warn_unexportable_adapters
from dflop_jax.train.loop import TrainLoop
from dflop_jax.train.plan_timer import run_with_memory_check
from dflop_jax.train.planning import check_trainable
from dflop_jax.train.profiling import check_not_empty
from dflop_jax.train.redecide import NewPlan
from dflop_jax.train.resume import (
    Resume,
    RunState,
    UnreadableCheckpoint,
    find_checkpoint,
    record_failure,
    restore,
)
from dflop_jax.train.run_context import RunContext, make_run_context, with_step_count
from dflop_jax.train.run_dir import is_restarted_run
from dflop_jax.train.start_budget import describe_start
from dflop_jax.train.trials import Trial, drop_pending, find_pending, next_plan

log = logging.getLogger("dflop_jax")
Existing = Literal["error", "overwrite", "resume"]


class Trainer:
    """A run of a configuration.

    Args:
      plan, profile: made from the configuration if not given.
      existing: what to do with another run in the folder: "error", "overwrite", or "resume" from
        its newest complete checkpoint (from the start if it has none), or a `Resume`. A run that
        `dflop launch` restarts is resumed in any case.
      dry: end before the first step; a folder made for it is removed.
      on_line: called on process 0 with a line about devices and model, then with one about the
        data, and with whether everything is checked that needs no measurement.

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
        on_line: Callable[[str, bool], None] | None = None,
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
        with broadcast_errors(self.peers):
            self._on_line = on_line if self.peers.is_primary else None
            if self._on_line and not is_restart():  # the first start has printed it
                self._on_line(describe_context(self.context), False)
            self._initializer = make_initializer(self.context.model, config.model.weights)
            if self.peers.is_primary:
                check_trackers(config)
                warn_unexportable_adapters(config, self.context.model, self.context.trained.frozen)
            self.source: Source = self.context.source()
            check_not_empty(self.source)
            self._requested_batch = config.train.global_batch
            self.context = with_step_count(self.context, len(self.source))
            self.config = config = self.context.config
            check_trainable(config)
            self._held_out: Source | None = None
            if config.train.evaluates:
                self._held_out = self.context.source("eval")
                if not len(self._held_out):
                    raise ValueError(
                        f"train.eval_samples={config.train.eval_samples}, but "
                        f"{self._held_out.name} holds out no sample; set it to 0, or add data"
                    )
            self.profile = profile
            self._trials: tuple[Trial, ...] = ()
            self._is_changing = False  # whether this process has decided to change plans
            self._checkpoints = Path(config.run_dir) / run_folder.CHECKPOINTS
            self._given_executor = plan_timer.make_executor(self.context, plan) if plan else None
            self._handover: Handover | None = None  # from the last plan

    def fit(self) -> FitResult:
        """Train to the last step and write the run folder. SIGINT, SIGTERM or SIGHUP make it save
        and end earlier; a second signal ends the process.

        Raises:
          ValueError: folder, checkpoint or given plan are of another run, no plan fits, or too many
            samples are undecodable.
          TransientError: another run writes to the folder.
        """
        losses: dict[int, float] = {}  # by step, each as it was run last
        n_compiles = 0
        with broadcast_errors(self.peers), watch_for_hangs(self.context):
            while True:
                # Errors are sent before the cleanup, which may wait for the other processes.
                with ExitStack() as stack, broadcast_errors(self.peers):
                    result, new_plan = self._fit_or_drop_plan(stack)
                if result:
                    losses |= enumerate(result.losses, result.steps_done - len(result.losses))
                    n_compiles += result.compiles_after_warmup
                    if result.preempted or new_plan is None:
                        break
                assert new_plan
                self._change_plan(new_plan)
            ordered_losses = tuple(losses[step] for step in sorted(losses))
            result = replace(result, losses=ordered_losses, compiles_after_warmup=n_compiles)
            for c in self._callbacks.active:
                c.at_end(result)
        return result

    def _fit_or_drop_plan(self, stack: ExitStack) -> tuple[FitResult | None, NewPlan | None]:
        """Train under one plan (`_fit_plan`). If it does not fit into memory, return no result and
        another plan of the trials, on all processes together. TransientError if they cannot agree:
        the next start drops the plan."""
        try:
            return self._fit_plan(stack)
        except PlanTooLarge as e:
            trials = drop_pending(self._trials, e.reason)
            plan = next_plan(trials)
            if plan is None:
                raise
            assert self.profile
            return None, NewPlan(plan, self.profile, trials)
        except MemoryShortage as e:  # the others wait for this process on their devices
            if (pending := find_pending(self._trials)) is None:
                raise
            record_failure(self._checkpoints, pending.plan, e.reason)
            raise TransientError(
                f"{e.reason}; start again with --resume auto: the run goes on without this plan"
            ) from None

    def _change_plan(self, new: NewPlan) -> None:
        """Go on under another plan: with the state handed over, or from the newest checkpoint, or
        from the start."""
        self.context.time_log.switch_to(REDECISION)
        self._existing, self.profile, self._is_changing = "resume", new.profile, True
        self._trials = self._trials if new.trials is None else new.trials
        gc.collect()  # the last plan's arrays in reference cycles, such as an error's traceback
        if self._handover is None:
            self._given_executor = plan_timer.make_executor(self.context, new.plan)

    def _fit_plan(self, stack: ExitStack) -> tuple[FitResult, NewPlan | None]:
        """Train under one plan, to the last step or until another plan saves time."""
        config, peers = self.config, self.peers
        peers.begin_run()
        check_same_config(config, peers)
        if peers.broadcast("begun", is_restarted_run(config.run_dir), bool):
            self._existing = "resume"
        resume, self._resume = self._resume, Resume()
        given_executor, self._given_executor = self._given_executor, None
        handover, self._handover = self._handover, None
        is_moved, is_saved = handover is not None, handover is not None and handover.is_saved
        checkpoint, unreadable = None, list[UnreadableCheckpoint]()
        if self._existing == "resume" and not handover:
            checkpoint = find_checkpoint(self._checkpoints, peers, unreadable, at=resume.at)
        stored = handover.state if handover else checkpoint[0] if checkpoint else None
        if stored and given_executor is None:
            self._trials = stored.trials
        # Before anything is written: the folder may be of a run on other data.
        loader, first_step = make_loader(config, self.source), 0
        if stored:
            first_step = loader.restore(stored.loader, config.data.changed)
        folder = self._open_folder(stack, is_resumed=stored is not None)
        every, quiet = config.train.log_every, not peers.is_primary
        progress = stack.enter_context(
            Progress(config.train.steps, first_step, log_interval=every, quiet=quiet)
        )
        context, source, move_s = self.context, self.source, 0.0
        if handover:
            move_s = move_run(handover, context, progress)
            given_executor, handover = handover.target, None  # frees the last plan's programs
        given = given_executor, self.profile, self._trials
        ex, state, timed = choose_plan(context, source, stored, *given, progress, self._report_data)
        self.profile, self._trials = state.profile, state.trials
        stack.callback(ex.close)
        saver = self._make_saver(ex)
        if not is_moved:
            initialize = partial(self._init_state, saver, ex, checkpoint, unreadable, resume)
            stored = run_with_memory_check(peers, ex.plan, "placing its parameters", initialize)
            is_saved = stored is not None or not find_pending(state.trials)
        if stored:
            state = state.continue_from(stored)
            progress.log(f"resumed after step {state.step} of {config.train.steps}")
        if state.step < first_step:  # an older checkpoint was used
            progress.restart(state.step)
        if folder:  # only now is it certain that the folder is of this run
            self._start_writing(folder, state, is_resumed=stored is not None)
        # A state that was saved to change plans has no prices of the new plan.
        has_run = stored is not None and stored.prices is not None and stored.plan == ex.plan
        is_same_plan, self._is_changing = has_run and not self._is_changing, False
        compile_s = self._compile(ex, state, timed, folder, progress, is_same_plan)
        if self._dry:
            peers.barrier("dry")
            return FitResult(Path(config.run_dir), (), None, 0, state.step, False), None
        run = PlannedRun(
            context=context,
            source=source,
            held_out=self._held_out,
            state=state,
            ex=ex,
            saver=saver,
            folder=folder,
            progress=progress,
            is_saved=is_saved,
            change_s=compile_s + move_s,
            ends_s=self._ends_s,
            callbacks=self._callbacks,
        )
        return self._run_steps(stack, run)

    def _init_state(
        self,
        saver: Checkpointer,
        ex: Executor,
        checkpoint: tuple[RunState, CheckpointReader] | None,
        unreadable: list[UnreadableCheckpoint],
        resume: Resume,
        _: object,
    ) -> RunState | None:
        """Restore the executor's state, or initialize it; return the restored one."""
        if checkpoint is None:
            ex.init(self.config.train.seed, self._initializer)
            return None
        ex.init_for_restore()
        reset = resume.reset_optimizer
        return restore(saver, checkpoint, unreadable, self.peers, reset_optimizer=reset)

    def _make_saver(self, ex: Executor) -> Checkpointer:
        config, waiting = self.config.checkpoint, partial(self.context.sections.within, SAVE)
        retention = {"keep": config.keep, "keep_every": config.keep_every}
        return Checkpointer(self._checkpoints, ex, self.peers, waiting=waiting, **retention)

    def _run_steps(self, stack: ExitStack, run: PlannedRun) -> tuple[FitResult, NewPlan | None]:
        """Run the steps of a compiled plan and write the summary."""
        translate = plan_timer.translate_memory_errors(self.peers, run.ex.plan, "in a step")
        with translate if find_pending(run.state.trials) else nullcontext():
            loop = TrainLoop(run)
            result = loop.run(stack)
        if run.folder and result.losses:
            with tolerate_full_disk(run.folder.path / run_folder.SUMMARY):
                write_summary(run.folder.path)
        self.peers.barrier("done")
        self._handover = loop.handover
        return result, loop.next_plan

    def _open_folder(self, stack: ExitStack, *, is_resumed: bool) -> RunFolder | None:
        """Open the run folder on process 0, without changing it yet."""
        if not self.peers.is_primary:
            return None
        try:
            folder = RunFolder(self.config.run_dir, existing=self._existing, launch=launch_name())
        except run_folder.FolderInUse as e:
            raise TransientError(str(e)) from None
        stack.enter_context(folder)
        stack.callback(self.context.time_log.finish_writing)
        for _ in read_samples(folder.rows[run_folder.CORRECTIONS]):
            pass  # raises for a broken line
        if not is_resumed:
            self.context.time_log.write_to(folder.rows[EVENTS])
        return folder

    def _compile(
        self,
        ex: Executor,
        state: RunState,
        timed: plan_timer.TimedPlan | None,
        folder: RunFolder | None,
        progress: Progress,
        is_same_plan: bool,
    ) -> float:
        """Compile the programs if needed; if the plan is new, time them, write it and report it.
        Return the seconds of compiling and timing."""
        is_same_plan = self.peers.broadcast("untimed", is_same_plan, bool)
        if timed is None:
            repeats = 0 if is_same_plan else plan_timer.REPEATS
            timed = plan_timer.compile_and_time(self.context, ex, repeats=repeats)
            cached = f", {timed.n_found} of them from the cache" * bool(timed.n_found)
            progress.log(f"compiled {timed.n_programs} programs in {timed.seconds:.1f} s{cached}")
        if folder:
            plan = ex.plan
            if not is_same_plan:
                assert state.prices
                plan = predict_plan(self.context, state, state.prices.prices, timed)
            if not (is_same_plan and (folder.path / run_folder.PLAN).exists()):
                folder.write_plan(plan)
            steps = self.config.train.steps - state.step
            progress.log(describe_remaining_time(plan, steps))
            steps_s = plan.predicted.makespan_s * steps
            progress.log(describe_start(self.context.time_log.start_up_s(), steps_s))
        return timed.seconds

    def _report_data(self) -> None:
        if self._on_line:
            self._on_line(
                describe_data(self.source, self.config.train, self._requested_batch), True
            )
            self._on_line = None  # once, also if plans change

    def _start_writing(self, folder: RunFolder, state: RunState, *, is_resumed: bool) -> None:
        """Start to write to a folder, after the steps of `state`."""
        config, time_log = self.config, self.context.time_log
        assert state.profile
        if self._existing == "resume":
            folder.restart(state.step)
        if is_resumed:
            time_log.write_to(folder.rows[EVENTS])
        time_log.resumed(state.step)
        folder.trackers = open_trackers(config, folder.path, state.step)
        folder.tracking_interval = config.train.log_every or 1
        folder.write_config(config)
        folder.write_profile(state.profile)


def watch_for_hangs(context: RunContext) -> AbstractContextManager[Any]:
    """Watch the deadlines of the run's sections (see `distributed.hang_watch`). A single process
    that `dflop train` did not start, such as a notebook, is not ended: its hang is only logged."""
    settings = context.config.distributed
    if not settings.hang_factor:
        return nullcontext()
    context.sections.begin(START)
    ends = context.peers.n_processes > 1 or is_cli_process.is_set()
    folder, end = Path(context.config.run_dir, run_folder.HUNG), None if ends else log.error
    return HangWatch(context.sections, context.peers, folder, end)


@contextmanager
def broadcast_errors(peers: ProcessGroup) -> Iterator[None]:
    """Send an error to all processes, so that none waits for this one."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError):  # a lost process causes it, too
            peers.wait_for_peer_loss()
        message = " ".join(str(error).split()) or type(error).__name__
        peers.fail(f"process {peers.process_index} stopped: {message}", exit_code_of(error))
        raise
