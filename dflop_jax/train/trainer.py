"""Trains a model under a plan: profile -> plan -> compile -> calibrate -> steps -> report.

With several processes each runs all of this; process 0 decides what the others are then sent: the
profile, the plan, the schedules, and when to stop.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from dflop_jax.checkpoint.checkpointer import Checkpointer
from dflop_jax.cluster.told import is_restart, least_processes
from dflop_jax.config import Config
from dflop_jax.data import Source, make_loader
from dflop_jax.pipeline.executor import Executor
from dflop_jax.records import AXES, Plan, PriceList, Prices, Profile, with_remat
from dflop_jax.report.progress import Progress
from dflop_jax.report.row_file import despite_full_disk
from dflop_jax.report.run_folder import CHECKPOINTS, SAMPLES, SUMMARY
from dflop_jax.report.run_folder import PLAN as PLAN_FILE
from dflop_jax.report.spent import EVENTS, PLAN, PROFILE, REDECISION, SAVE
from dflop_jax.report.summary import write_summary
from dflop_jax.report.trackers import check_trackers, open_trackers
from dflop_jax.train.answers import MakeAnswers, made_answers
from dflop_jax.train.callbacks import Callback, Callbacks
from dflop_jax.train.device_check import DeviceCheck
from dflop_jax.train.exports import check_exports
from dflop_jax.train.initial import published
from dflop_jax.train.judge import Judge, go_back
from dflop_jax.train.loop import Loop
from dflop_jax.train.meta import Continued, continued, planned_under, same_value
from dflop_jax.train.planning import (
    check_held_out,
    check_layers,
    check_trainable,
    make_plan,
)
from dflop_jax.train.prepare import Workplace, in_steps, set_up
from dflop_jax.train.profiling import check_not_empty, make_profile
from dflop_jax.train.ready import (
    ReadyRun,
    agree,
    data_line,
    expected,
    predicted,
    refuse,
    workplace_line,
)
from dflop_jax.train.recount import KnownPlan, find_plan, keep_plan, with_links
from dflop_jax.train.restart import (
    check_agents,
    check_claim,
    copies_of,
    is_begun,
    open_folder,
    tell_agent,
    tell_others,
)
from dflop_jax.train.results import FitResult, LoopResult, fit_result
from dflop_jax.train.resume import Resume, Resumed, find_checkpoint, restore
from dflop_jax.train.sample_file import SampleFile
from dflop_jax.train.timing import REPEATS, PlanTrials, Timed, compile_and_time, make_executor
from dflop_jax.train.trying import said_in_a_line
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
      dry: end before the first step, with profile and plan written and what is expected said.
      answers: makes what answers held-out samples, see `train.eval_generate_every`.
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
        answers: MakeAnswers | None = None,
    ):
        said = existing if isinstance(existing, Resume) else Resume()
        self._resume = Resume() if is_restart() else said  # of the first start
        self._existing: Literal["error", "overwrite", "resume"]
        self._existing = "resume" if isinstance(existing, Resume) else existing
        self._dry = dry
        hours = config.train.max_hours
        self._ends_s = time.monotonic() + 3600 * hours if hours else math.inf
        self._in_haste = False  # others' devices wait as this run goes on without them
        self._loop: Loop | None = None
        try:
            check_trainable(config)
            check_agents(plan, config)
            self.place: Workplace = set_up(config, resume=self._existing == "resume")
        except BaseException as e:  # before there are others to be told
            tell_agent(e)
            raise
        self.peers = self.place.peers
        self._callbacks = Callbacks(callbacks, is_first=self.peers.is_hub)
        # Who goes back later, or on with another plan, does so from the disk.
        self._held = self._copies = copies_of(config, self.peers)
        with self._told_to_others():
            self._tell = tell if self.peers.is_hub else lambda line, ready: None
            self._tell(workplace_line(self.place), False)
            check_exports(config, self.place.model)
            self._begin = published(self.place.model, config.model.weights)
            if self.peers.is_hub:
                check_trackers(config)
            self.source: Source = self.place.source()
            check_not_empty(self.source)
            self.place = in_steps(self.place, len(self.source))
            self.config = config = self.place.config
            check_trainable(config)
            self._held_out: Source | None = None
            if config.train.evaluates:
                self._held_out = self.place.source("eval")
                check_held_out(config, self._held_out)
            self._answers = made_answers(answers, config, self.place, self._held_out)
            self.profile = profile
            self._executor = self._make_executor(plan) if plan else None
            self._timed: Timed | None = None

    @contextmanager
    def _told_to_others(self) -> Iterator[None]:
        """Tell all processes of an error, so that none waits for this one."""
        try:
            yield
        except BaseException as e:
            if tell_others(self.peers, e):
                tell_agent(e, *(self._loop.under_way() if self._loop else ()))
            raise

    def _make_executor(self, plan: Plan) -> Executor:
        return make_executor(self.place, plan)

    def fit(self) -> FitResult:
        """Train to the last step and write the run folder. SIGINT, SIGTERM or SIGHUP save and end
        it earlier, a second one ends the process.

        Raises:
          ValueError: the folder holds another run or its checkpoint is of another model, no plan
            fits, or too many samples are bad.
          TryAgain: another run writes to the folder.
        """
        results: list[LoopResult] = []
        self._judge = Judge(self.place, DeviceCheck(self.place.devices, self.peers))
        with self._told_to_others(), watched(self.place):
            while True:
                # Told before anything is cleaned up, which may wait for what the others compute.
                with ExitStack() as stack, self._told_to_others():
                    results.append(self._fit(stack))
                new, back_to = results[-1].next, results[-1].back_to
                if results[-1].preempted or (new is None and back_to is None):
                    break
                if back_to is not None:
                    self._existing = "resume"
                    self._executor = self._timed = None
                    self.place = replace(self.place, devices=self._judge.devices)
                    self._executor = go_back(self.place, results[-1].plan, back_to)
                    continue
                assert new is not None
                self.place.time.go_on_with(REDECISION)
                self._existing, self.profile = "resume", new.profile
                self._executor = self._timed = None  # whose memory the next one's state needs
                self._executor = self._make_executor(new.plan)
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
        held, self._held = self._held, None
        resumed = None
        if self._existing == "resume":
            resumed = find_checkpoint(checkpoints, peers, at=asked.at, copies=held)
        # Before anything is written: the folder may be of a run on other data.
        start = make_loader(config, self.source).restore(resumed.meta.loader) if resumed else 0
        folder, samples = None, None
        if peers.is_hub:
            folder = stack.enter_context(open_folder(config.run_dir, self._existing))
            stack.callback(self.place.time.stop_writing)
            samples = SampleFile(folder.rows[SAMPLES])
            if not resumed:
                self.place.time.write_to(folder.rows[EVENTS])
        progress = stack.enter_context(Progress.of(config.train, start, quiet=not peers.is_hub))
        begun_s = time.perf_counter()
        ex, prices = self._prepare(progress, resumed)
        stack.callback(ex.close)
        saver = Checkpointer(
            checkpoints,
            ex,
            peers,
            keep=config.checkpoint.keep,
            keep_every=config.checkpoint.keep_every,
            waiting=partial(self.place.sections.within, SAVE),
            may_commit=partial(check_claim, config.run_dir),
            copies=self._copies,
        )
        placing_s = time.perf_counter()
        resumed = self._place_state(ex, saver, resumed, reset_optimizer=asked.reset_optimizer)
        if self._copies:
            progress.log(self._copies.begin(resumed.copy if resumed else None, saver.n_bytes))
        assert self.profile is not None
        first_step = resumed.meta.step if resumed else 0
        if first_step < start:
            progress.restart(first_step)
        if resumed:
            took_s = time.perf_counter() - placing_s
            progress.log(f"{resumed.says(config.train.steps)}, read in {took_s:.1f} s")
        if folder:  # only now it is clear that the folder is of this run
            if self._existing == "resume":
                folder.restart(first_step)
            if resumed:
                self.place.time.write_to(folder.rows[EVENTS])
            self.place.time.resumed(first_step)
            folder.trackers = open_trackers(config, folder.path, first_step)
            folder.track_every = config.train.log_every or 1
            folder.write_config(config)
            folder.write_profile(self.profile)
        # The plan's figures are in the folder then, and nothing else asks for times.
        as_it_was = resumed is not None and resumed.meta.plan == ex.plan
        untimed = as_it_was or self._in_haste
        untimed = peers.share("untimed", b"1" * untimed if peers.is_hub else None) == b"1"
        timed = self._timed or self._warm_up(ex, progress, repeats=0 if untimed else REPEATS)
        if folder:
            made = ex.plan if untimed else predicted(self.place, self.profile, prices, timed)
            if not (as_it_was and (folder.path / PLAN_FILE).exists()):
                folder.write_plan(made)
            progress.log(expected(made, config.train.steps - first_step))
            if least_processes():
                under = planned_under(self.place)
                keep_plan(config.run_dir, KnownPlan(under, ex.plan, PriceList.of(prices)))
        if self._dry:
            peers.barrier("dry")
            return LoopResult((), (), None, first_step, False, ex.plan)
        data = self.source, self._held_out, self.profile
        more = time.perf_counter() - begun_s, self._ends_s, self._callbacks
        ready = ReadyRun(
            config, self.place, *data, ex, prices, saver, folder, samples, progress, *more,
            answers=self._answers,
        )  # fmt: skip
        self._loop = Loop(ready, self._judge)
        stack.callback(setattr, self, "_loop", None)  # and its memory
        result = self._loop.run(stack, resumed)
        if folder and result.losses:
            with despite_full_disk(folder.path / SUMMARY):
                write_summary(folder.path)
        peers.barrier("done")
        if self._copies and config.checkpoint.saves:
            self._copies.keep_only(None)
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
                found = restore(saver, resumed, self.peers, reset_optimizer=reset_optimizer)
                if found is not None:
                    return found
            ex.init(self.config.train.seed, self._begin)
            return None

    def _prepare(self, progress: Progress, resumed: Resumed | None) -> tuple[Executor, Prices]:
        """Return the plan's executor, and the prices that batches are scheduled by: those of the
        checkpoint where the run goes on as it was, so that it makes the same schedules."""
        plan = self._executor.plan if self._executor else None
        known, is_given = Continued(plan, self.profile), self.profile is not None
        if resumed:
            remedy = "use the same model, or start a new run"
            check_layers(self.place, resumed.meta.profile, "the checkpoint", remedy)
        if resumed and self.peers.is_hub:
            known = continued(resumed.meta, planned_under(self.place), plan, self.profile)
            if known.plan is None:
                known = self._planned_before(known)
            if known.says:
                progress.log(known.says)
        # What process 0 was given or reads holds for all.
        given = known.profile, known.plan, known.recounted
        shared = self.peers.share("given", msgspec.json.encode(given))
        self.profile, plan, recounted = msgspec.json.decode(
            shared, type=tuple[Profile | None, Plan | None, bool]
        )
        prices = known.prices
        if self.profile and recounted and not is_given:
            self.profile = with_links(self.place, self.profile)
        refuse(self.place, self.source, self.profile, plan)
        self._tell(data_line(self.source, self.config.train), True)
        self._tell = lambda line, ready: None  # once, also where plans change
        if self.profile is None:
            progress.log("profiling model and data")
            with self.place.time.part(PROFILE):
                self.profile = make_profile(self.place, self.source)
                shared = self.peers.share("profiled", msgspec.json.encode(self.profile))
            self.profile = msgspec.json.decode(shared, type=Profile)
        remat = self.config.train.remat
        if plan and remat != "auto" and (other := with_remat(plan, remat)) != plan:
            plan, prices = other, None
        self._in_haste = recounted and is_restart()
        with self.place.time.part(PLAN):
            plan, prices = self._choose(plan, prices, self.profile, progress)
        if self._executor is None or self._executor.plan != plan:
            self._executor = self._make_executor(plan)
        meshes = ", ".join(f"{m.name} {m.text}" for m in plan.layout.submeshes)
        progress.log(
            f"plan {plan.policy}: {meshes} ({' x '.join(AXES)}); buckets "
            + ", ".join(b.name for b in plan.layout.buckets)
            + (f"; up to {plan.layout.fan_in} groups feed one" if plan.layout.fan_in > 1 else "")
        )
        return self._executor, prices

    def _planned_before(self, known: Continued) -> Continued:
        """What to go on with where a plan was made for these devices before, on process 0."""
        before = find_plan(self.config.run_dir, planned_under(self.place), same_value)
        if before is None or known.profile is None:
            return known
        says = known.says.replace(": planning anew", ": the plan for it is there")
        return replace(known, plan=before.plan, prices=before.prices.prices, says=says)

    def _choose(
        self, plan: Plan | None, prices: Prices | None, profile: Profile, progress: Progress
    ) -> tuple[Plan, Prices]:
        """Return the plan that process 0 was given or finds, and its prices; where programs are
        timed for it, all take part, and the chosen plan's executor is ready."""
        trials = PlanTrials(self.place, profile, progress, self.place.plannable_bytes)
        if not self.peers.is_hub:
            plan, prices = trials.follow()
        else:
            if plan is None:
                progress.log("planning")
                on_devices: dict[str, Any] = {
                    "time_plan": trials.prices,
                    "try_step": trials.rehearse,
                }
                if self._in_haste:  # each plan that is timed is compiled first
                    planning = self.config.plan
                    by_profile = replace(planning, node=self.place.node, finalists=0)
                    on_devices |= {"config": by_profile, "time_plan": trials.by_profile}
                plan = make_plan(self.place, profile, **on_devices).plan
                prices = trials.by_profile(plan) if self._in_haste else trials.prices(plan)
            elif prices is None:
                prices = trials.prices(plan)
                trials.rehearse(plan, prices)
            trials.choose(plan, prices)
        if timed := trials.take(plan):
            if self._executor:
                self._executor.close()
            self._timed, self._executor = timed, timed.executor
        return plan, prices

    def _warm_up(self, ex: Executor, progress: Progress, repeats: int) -> Timed:
        """Compile everything, run it once and time it, all processes together."""
        start_s = time.perf_counter()
        timed = compile_and_time(self.place, ex, repeats=repeats)
        progress.log(timed.says(time.perf_counter() - start_s))
        return timed
