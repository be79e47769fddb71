"""Chooses the plan of a run before its first step: a given, stored or new plan."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

from dflop_jax.checkpoint.checkpointer import Checkpointer
from dflop_jax.config import Config, TrainConfig
from dflop_jax.data import Source
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.plan.evaluate import filter_fitting_loads
from dflop_jax.records import AXES, Plan, PriceList, Prices, Profile, Schedule, with_remat
from dflop_jax.report.number_format import duration, number
from dflop_jax.report.progress import Progress
from dflop_jax.report.run_folder import CHECKPOINTS, RunFolder
from dflop_jax.report.wall_time import PLAN, PROFILE
from dflop_jax.runtime.executor import Executor
from dflop_jax.schedule.batch_scheduler import schedule_batch
from dflop_jax.simulate.steps import simulate_schedules
from dflop_jax.train import profiling
from dflop_jax.train.callbacks import Callbacks
from dflop_jax.train.plan_timer import (
    PlanTimer,
    TimedPlan,
    describe_plan,
    load_count_program,
    make_executor,
)
from dflop_jax.train.planning import (
    check_layers,
    check_named_remat,
    check_plannable,
    make_plan,
    max_alternatives,
)
from dflop_jax.train.resume import (
    RunState,
    describe_changed_flags,
    drop_failed_plans,
    is_other_device_count,
    reuse_state,
    run_settings,
)
from dflop_jax.train.run_context import RunContext, trial_steps
from dflop_jax.train.trials import (
    MAX_TRIALS,
    Trial,
    TrialRun,
    find_pending,
    list_results,
    make_trials,
)


@dataclass(frozen=True)
class PlannedRun:
    """A run before its first step under a plan."""

    context: RunContext
    source: Source
    held_out: Source | None  # the samples to evaluate on
    state: RunState  # before that step; its plan is the executor's
    ex: Executor
    saver: Checkpointer
    folder: RunFolder | None  # on process 0
    progress: Progress
    is_saved: bool  # whether a checkpoint has `state`; before the first step only trials need one
    change_s: float  # seconds of the last change: compiling, timing, and moving the state if it was
    ends_s: float  # when `train.max_hours` are over, in `time.monotonic` seconds
    callbacks: Callbacks

    @property
    def profile(self) -> Profile:
        assert self.state.profile
        return self.state.profile

    @cached_property
    def prices(self) -> Prices:
        assert self.state.prices
        return self.state.prices.prices


def check_same_config(config: Config, peers: ProcessGroup) -> None:
    """Raise ValueError unless every process has the same configuration."""
    own_values = msgspec.json.decode(msgspec.json.encode(config))
    primary_values = peers.broadcast("config", own_values, dict)
    for name, value in primary_values.items():
        if name not in ("distributed", "cache_dir") and own_values[name] != value:
            raise ValueError(
                f"process {peers.process_index} was started with {name}={own_values[name]}, "
                f"process 0 with {value}; start all with the same configuration"
            )


def describe_context(context: RunContext) -> str:
    """Return a line about the devices and the model of a run."""
    n_processes = context.peers.n_processes
    if context.hardware:
        devices = f"{context.hardware.name}, which are not here"
    else:
        devices = ", ".join(sorted({d.device_kind for d in context.devices}))
    if n_processes > 1:
        devices += f" of {n_processes} processes on {len({*context.hosts})} hosts"
    sizes: Counter[str] = Counter()
    for module in context.model.modules.values():
        for part_name, n in profiling.parameter_counts(module).items():
            sizes[module.freeze_groups[part_name]] += n
    groups_by_status = {"trained": context.trained.rates, "frozen": context.trained.frozen}
    parameters = "; ".join(
        f"{status} " + ", ".join(f"{group} {number(sizes[group])}" for group in groups)
        for status, groups in groups_by_status.items()
        if groups
    )
    config = context.config.model
    return (
        f"devices: {context.n_devices} x {devices}; model: {config.factory} {config.size}, "
        f"{config.dtype}; parameters: {parameters}"
    )


def describe_data(source: Source, train: TrainConfig, requested_batch: int) -> str:
    """Return a line about the data and the steps of a run; `train` is from `with_step_count`."""
    n, batch = len(source), train.global_batch
    lowered = f" (train.global_batch {requested_batch} is lowered, there are no more)"
    return (
        f"data: {source.name}: {n:,} samples; {train.steps:,} steps of {batch} samples"
        f"{lowered * (batch < requested_batch)}, {number(train.steps * batch / n)} epochs"
    )


def describe_remaining_time(plan: Plan, steps: int) -> str:
    if steps <= 0:
        return "no step is left; raise --train.steps or --train.epochs to train on"
    step_s = plan.predicted.makespan_s
    left_s = step_s * steps
    end = datetime.now() + timedelta(seconds=left_s)
    return (
        f"expected: {duration(step_s)} a step, {steps:,} steps in {duration(left_s)}, "
        f"the last about {end:%Y-%m-%d %H:%M}"
    )


def choose_plan(
    context: RunContext,
    source: Source,
    stored: RunState | None,
    given_executor: Executor | None,
    profile: Profile | None,
    trials: tuple[Trial, ...],
    progress: Progress,
    on_checked: Callable[[], None],
) -> tuple[Executor, RunState, TimedPlan | None]:
    """Choose the plan to train under, on all processes together; profile and search if needed.
    ValueError if the checkpoint is of another model, or no plan fits; PlanTooLarge on all processes
    if a given or stored plan does not fit.

    Args:
      stored: the state of the checkpoint to resume.
      given_executor, profile: of the plan that the user gave, or to which the run has moved its
        state; preferred to the checkpoint's.
      trials: of the run so far; a new search replaces them.
      on_checked: called once everything is checked that needs no measurement.

    Returns:
      The executor; the state with plan, profile, prices, settings and trials of this run; and the
      timed plan if the choice compiled it.
    """
    settings = run_settings(context)
    state = _reuse_on_all(context, stored, given_executor, profile, settings, progress.log)
    plan, profile = state.plan, state.profile
    if given_executor is None:
        trials = state.trials
    prices = state.prices.prices if state.prices else None
    check_before_measuring(context, source, profile, plan)
    on_checked()
    if profile is None:
        progress.log("profiling model and data")
        with context.time_log.track(PROFILE):
            measured = profiling.make_profile(context, source)
            profile = context.peers.broadcast("profiled", measured, Profile)
        if budget := profiling.start_budget(context, profile):
            progress.log(str(budget))
    remat = context.config.train.remat
    if plan and remat != "auto" and (plan_with_remat := with_remat(plan, remat)) != plan:
        plan, prices = plan_with_remat, None
    with context.time_log.track(PLAN):
        has_state = given_executor is not None and bool(given_executor.state.params)
        timer = PlanTimer(context, profile, progress, given_executor if has_state else None)
        if context.peers.is_primary:
            if plan is None:
                progress.log("planning")
                plan, trials = _search_plan(context, profile, timer, state.step)
                prices = timer.prices(plan)
            elif prices is None:
                prices = timer.time_given(plan)
            timer.choose(plan, prices)
        else:
            plan, prices = timer.serve_requests()
        timed = timer.take_timed_plan(plan)
        trials = context.peers.broadcast("trials", trials, tuple[Trial, ...])
    is_replaced = timed is not None and timed.executor is not given_executor
    if given_executor and (is_replaced or given_executor.plan != plan):
        given_executor.close()
        given_executor = None
    fan_in = plan.layout.fan_in
    progress.log(
        f"plan {describe_plan(plan)} ({' x '.join(AXES)})"
        + (f"; up to {fan_in} groups feed one" if fan_in > 1 else "")
    )
    executor = timed.executor if timed else given_executor or make_executor(context, plan)
    state = replace(state, plan=plan, profile=profile, trials=trials, settings=settings)
    return executor, replace(state, prices=PriceList.from_prices(prices)), timed


def _search_plan(
    context: RunContext, profile: Profile, timer: PlanTimer, first_step: int
) -> tuple[Plan, tuple[Trial, ...]]:
    """Return the best plan that has not failed in this run, and pending trials of plans if the run
    chooses by trials."""
    result = make_plan(
        context,
        profile,
        time_plan=timer.prices,
        try_step=timer.try_step,
        max_alternatives=max_alternatives(context, profile, first_step),
    )
    found = RunState(plan=result.plan, trials=make_trials([result.plan, *result.alternatives]))
    found = drop_failed_plans(found, Path(context.config.run_dir, CHECKPOINTS))
    assert found.plan
    return found.plan, found.trials


def _reuse_on_all(
    context: RunContext,
    stored: RunState | None,
    given_executor: Executor | None,
    profile: Profile | None,
    settings: dict[str, Any],
    log: Callable[[str], None],
) -> RunState:
    """Return the state with process 0's given or stored plan and profile, and there its prices."""
    is_given, peers = profile is not None, context.peers
    given_plan = given_executor.plan if given_executor else None
    state = replace(stored or RunState(), plan=given_plan, profile=profile, prices=None)
    if stored:
        assert stored.profile
        remedy = "use the same model, or start a new run"
        check_layers(context, stored.profile, "the checkpoint", remedy)
        if peers.is_primary:
            if changed := describe_changed_flags(stored.settings, settings):
                log(f"resumed with {changed}")
            state, message = reuse_state(stored, settings, given_plan, profile)
            if message:
                log(message)
            if state.plan and given_plan is None:
                state = drop_failed_plans(state, Path(context.config.run_dir, CHECKPOINTS))
    plan, profile = peers.broadcast(
        "given", (state.plan, state.profile), tuple[Plan | None, Profile | None]
    )
    has_other_links = stored is not None and is_other_device_count(stored.settings, settings)
    if profile and profile.model.hardware and has_other_links and not is_given:
        facts = replace(profile.model, hardware=profiling.measure_hardware(context))
        profile = replace(profile, model=facts)
    return replace(state, plan=plan, profile=profile)


def check_before_measuring(
    context: RunContext, source: Source, profile: Profile | None, plan: Plan | None
) -> None:
    """Raise ValueError, before measuring, for errors that do not depend on measurements."""
    if profile is not None:
        check_layers(context, profile, "the profile", "profile again")
    elif plan is None:
        check_plannable(context)
    if plan is not None:
        check_named_remat(context)
        if profile is None and context.peers.is_primary:
            filter_fitting_loads(plan, profiling.profile_data(context, source).loads)


def schedule_sampled(
    config: Config, profile: Profile, ex: Executor, prices: Prices, n_batches: int
) -> list[Schedule]:
    """Return schedules of the profile's first batches, the same for all plans that fit them."""
    loads = itertools.cycle(filter_fitting_loads(ex.plan, profile.data.loads))
    n, program = config.train.global_batch, load_count_program(ex.plan, config.cache_dir)
    return [
        schedule_batch(
            [*itertools.islice(loads, n)], ex.plan, prices, ex.trainable, step=k, program=program
        )
        for k in range(n_batches)
    ]


def start_trial(run: PlannedRun) -> TrialRun | None:
    """Return the trial that the run's plan is for; None if the run has no trial left."""
    config, trials = run.context.config, run.state.trials
    n_steps = trial_steps(config)
    if not (n_steps and find_pending(trials)):
        return None
    sampled_s = 0.0
    if run.context.peers.is_primary:
        n_batches = MAX_TRIALS * config.plan.sampled_batches
        schedules = schedule_sampled(config, run.profile, run.ex, run.prices, n_batches)
        sampled_s = mean(s.makespan_s for s in schedules)
    return TrialRun(trials, run.state.step, n_steps, sampled_s)


def predict_plan(context: RunContext, state: RunState, prices: Prices, timed: TimedPlan) -> Plan:
    """Return the timed plan with predictions by its measured times; `prices` schedule batches."""
    ex, config = timed.executor, context.config
    profile, plan = state.profile, ex.plan
    assert profile
    schedules = schedule_sampled(config, profile, ex, prices, config.plan.sampled_batches)
    # Step ends keep the prices that the plan was chosen by; those timed here used another state.
    measured = replace(timed.prices(profile.model), step_end=prices.step_end)
    trace = simulate_schedules(plan, schedules, measured, ex.trainable, synchronous=ex.awaited)
    busy_fraction = trace.busy_fraction()  # includes links
    figures = replace(
        plan.predicted,
        makespan_s=trace.makespan_s / len(schedules),
        busy_fraction={m.name: busy_fraction.get(m.name, 0.0) for m in plan.layout.submeshes},
        chosen_by_s=plan.predicted.chosen_by_s or mean(s.makespan_s for s in schedules),
    )
    return replace(plan, predicted=figures, trials=list_results(state.trials))
