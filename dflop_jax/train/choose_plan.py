"""What comes before the first step of a run: its plan (given, a checkpoint's or a new one, the same
on all processes), and what is said and refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property
from statistics import mean
from typing import Any

import msgspec

from dflop_jax.checkpoint.checkpointer import Checkpointer
from dflop_jax.config import Config, TrainConfig
from dflop_jax.data import Source
from dflop_jax.distributed.messages import ProcessGroup
from dflop_jax.plan.simulate_batches import loads_that_fit
from dflop_jax.profile.optimizer_state import FLOAT32_BYTES
from dflop_jax.records import AXES, Plan, PriceList, Prices, Profile, with_remat
from dflop_jax.report.number_format import duration, number
from dflop_jax.report.progress import Progress
from dflop_jax.report.run_folder import RunFolder
from dflop_jax.report.wall_time import PLAN, PROFILE
from dflop_jax.runtime.executor import Executor
from dflop_jax.schedule.batch_scheduler import schedule_batch
from dflop_jax.simulate.steps import simulate_schedules
from dflop_jax.train.callbacks import Callbacks
from dflop_jax.train.plan_trials import PlanTrials, TimedPlan, describe_plan, make_executor
from dflop_jax.train.planning import check_layers, check_named_remat, check_plannable, make_plan
from dflop_jax.train.profiling import (
    make_profile,
    measure_hardware,
    parameter_bytes,
    profile_data,
)
from dflop_jax.train.resume import (
    RunState,
    is_other_device_count,
    reuse_state,
    run_settings,
)
from dflop_jax.train.run_context import RunContext

# Batches of the profiled data whose mean step is what a plan predicts; twice as many are scheduled
# in twice the time, and scatter less by a third.
_PREDICTED_BATCHES = 4


@dataclass(frozen=True)
class PlannedRun:
    """A run before the first of its steps under a plan.

    Attributes:
      held_out: the samples to evaluate on.
      state: the run's state before that step; its plan is the executor's.
      folder: process 0's.
      start_s: seconds that choosing, compiling and restoring took.
      ends_s: when `train.max_hours` are over, by `time.monotonic`.
      callbacks: the user's, that this process calls.
    """

    context: RunContext
    source: Source
    held_out: Source | None
    state: RunState
    ex: Executor
    saver: Checkpointer
    folder: RunFolder | None
    progress: Progress
    start_s: float
    ends_s: float
    callbacks: Callbacks

    @property
    def profile(self) -> Profile:
        assert self.state.profile
        return self.state.profile

    @cached_property
    def prices(self) -> Prices:
        """The prices that batches are scheduled by."""
        assert self.state.prices
        return self.state.prices.prices


def check_same_config(config: Config, peers: ProcessGroup) -> None:
    """ValueError unless every process has the same configuration."""
    own_values = msgspec.json.decode(msgspec.json.encode(config))
    primary_values = peers.broadcast("config", own_values, dict)
    for name, value in primary_values.items():
        if name not in ("distributed", "cache_dir") and own_values[name] != value:
            raise ValueError(
                f"process {peers.process_index} was started with {name}={own_values[name]}, "
                f"process 0 with {value}; start all with the same configuration"
            )


def describe_context(context: RunContext) -> str:
    """Devices and model of a run, in a line."""
    if context.hardware:
        devices = f"{context.n_devices} x {context.hardware.name}, which are not here"
    else:
        kinds = sorted({d.device_kind for d in context.devices})
        hosts = len(set(context.hosts)) or 1
        devices = f"{context.n_devices} x {', '.join(kinds)}"
        devices += f" of {context.peers.n_processes} processes on {hosts} hosts" * (
            context.peers.n_processes > 1
        )
    sizes: Counter[str] = Counter()
    for module in context.model.modules.values():
        for part_name, n_bytes in parameter_bytes(module).items():
            sizes[module.freeze_groups[part_name]] += round(n_bytes / FLOAT32_BYTES)
    groups_by_status = {"trained": context.trained.rates, "frozen": context.trained.frozen}
    parameters = "; ".join(
        f"{status} " + ", ".join(f"{group} {number(sizes[group])}" for group in groups)
        for status, groups in groups_by_status.items()
        if groups
    )
    config = context.config.model
    return (
        f"devices: {devices}; model: {config.factory} {config.size}, "
        f"{config.dtype}; parameters: {parameters}"
    )


def describe_data(source: Source, train: TrainConfig, requested_batch: int) -> str:
    """Data and steps of a run, in a line.

    Args:
      train: of the steps as they are run (`run_context.with_step_count`).
      requested_batch: the global batch before it was lowered to the samples that there are.
    """
    n, batch = len(source), train.global_batch
    lowered = f" (train.global_batch {requested_batch} is lowered, there are no more)"
    return (
        f"data: {source.name}: {n:,} samples; {train.steps:,} steps of {batch} samples"
        f"{lowered * (batch < requested_batch)}, {number(train.steps * batch / n)} epochs"
    )


def describe_remaining_time(plan: Plan, steps: int) -> str:
    """What a plan says of the steps that are left, in a line."""
    if steps <= 0:
        return "no step is left; a greater --train.steps, or --train.epochs, goes on"
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
    progress: Progress,
    on_checked: Callable[[], None],
) -> tuple[Executor, RunState, TimedPlan | None]:
    """Choose the plan to train under, all processes together; what is not known is measured and
    searched.

    Args:
      stored: the state of the checkpoint that is resumed.
      given_executor, profile: the executor of a given plan, closed where another plan is chosen,
        and a given profile; they go before those of the checkpoint.
      on_checked: called once all is checked that can be checked without measuring.

    Returns:
      The executor; the run's state with plan, profile, prices and settings of this run; and the
      compiled executor with its times where the choice compiled and timed it.

    Raises:
      ValueError: the checkpoint is of another model, or no plan fits.
    """
    settings = run_settings(context)
    state = _reuse_on_all(context, stored, given_executor, profile, settings, progress.log)
    plan, profile = state.plan, state.profile
    prices = state.prices.prices if state.prices else None
    check_before_measuring(context, source, profile, plan)
    on_checked()
    if profile is None:
        progress.log("profiling model and data")
        with context.time_log.track(PROFILE):
            measured = make_profile(context, source)
            profile = context.peers.broadcast("profiled", measured, Profile)
    remat = context.config.train.remat
    if plan and remat != "auto" and (plan_with_remat := with_remat(plan, remat)) != plan:
        plan, prices = plan_with_remat, None
    with context.time_log.track(PLAN):
        trials = PlanTrials(context, profile, progress, context.plannable_bytes)
        if context.peers.is_primary:
            if plan is None:
                progress.log("planning")
                plan = make_plan(
                    context, profile, time_plan=trials.prices, try_step=trials.try_step
                ).plan
                prices = trials.prices(plan)
            elif prices is None:
                prices = trials.prices(plan)
                trials.try_step(plan, prices)
            trials.choose(plan, prices)
        else:
            plan, prices = trials.serve_requests()
        timed = trials.take_timed_plan(plan)
    if given_executor and (timed or given_executor.plan != plan):
        given_executor.close()
        given_executor = None
    fan_in = plan.layout.fan_in
    progress.log(
        f"plan {describe_plan(plan)} ({' x '.join(AXES)})"
        + (f"; up to {fan_in} groups feed one" if fan_in > 1 else "")
    )
    executor = timed.executor if timed else given_executor or make_executor(context, plan)
    price_list = PriceList.from_prices(prices)
    state = replace(state, plan=plan, profile=profile, prices=price_list, settings=settings)
    return executor, state, timed


def _reuse_on_all(
    context: RunContext,
    stored: RunState | None,
    given_executor: Executor | None,
    profile: Profile | None,
    settings: dict[str, Any],
    log: Callable[[str], None],
) -> RunState:
    """Return the state that a run begins with, with the plan and profile that process 0 was given
    or finds in the checkpoint; only process 0 has prices."""
    is_given, peers = profile is not None, context.peers
    given_plan = given_executor.plan if given_executor else None
    state = replace(stored or RunState(), plan=given_plan, profile=profile, prices=None)
    if stored:
        assert stored.profile
        remedy = "use the same model, or start a new run"
        check_layers(context, stored.profile, "the checkpoint", remedy)
        if peers.is_primary:
            state, message = reuse_state(stored, settings, given_plan, profile)
            if message:
                log(message)
    plan, profile = peers.broadcast(
        "given", (state.plan, state.profile), tuple[Plan | None, Profile | None]
    )
    has_other_links = stored is not None and is_other_device_count(stored.settings, settings)
    if profile and profile.model.hardware and has_other_links and not is_given:
        facts = replace(profile.model, hardware=measure_hardware(context))
        profile = replace(profile, model=facts)
    return replace(state, plan=plan, profile=profile)


def check_before_measuring(
    context: RunContext, source: Source, profile: Profile | None, plan: Plan | None
) -> None:
    """ValueError, before anything is measured, for what no measurement would change."""
    if profile is not None:
        check_layers(context, profile, "the profile", "profile again")
    elif plan is None:
        check_plannable(context)
    if plan is not None:
        check_named_remat(context)
        if profile is None and context.peers.is_primary:
            loads_that_fit(plan, profile_data(context, source).loads)


def predict_plan(context: RunContext, profile: Profile, prices: Prices, timed: TimedPlan) -> Plan:
    """The plan of the timed programs, its predictions made anew from their times; its batches are
    scheduled by `prices`."""
    ex, global_batch = timed.executor, context.config.train.global_batch
    plan = ex.plan
    loads = loads_that_fit(plan, profile.data.loads)
    batches = [
        [loads[(k * global_batch + i) % len(loads)] for i in range(global_batch)]
        for k in range(_PREDICTED_BATCHES)
    ]
    schedules = [
        schedule_batch(b, plan, prices, ex.trainable, step=k) for k, b in enumerate(batches)
    ]
    # Those that the plan was chosen by were timed on a state that was not needed.
    measured = replace(timed.prices(profile.model), step_end=prices.step_end)
    trace = simulate_schedules(plan, schedules, measured, ex.trainable, synchronous=ex.awaited)
    busy_fraction = trace.busy_fraction()  # of links too
    figures = replace(
        plan.predicted,
        makespan_s=trace.makespan_s / len(batches),
        busy_fraction={m.name: busy_fraction.get(m.name, 0.0) for m in plan.layout.submeshes},
        chosen_by_s=plan.predicted.chosen_by_s or mean(s.makespan_s for s in schedules),
    )
    return replace(plan, predicted=figures)
