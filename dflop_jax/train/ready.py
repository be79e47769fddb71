"""What comes before the first step of a run, beside its plan and programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from statistics import mean

import msgspec

from dflop_jax.checkpoint.checkpointer import Checkpointer
from dflop_jax.cluster.messages import ProcessGroup
from dflop_jax.config import Config, TrainConfig
from dflop_jax.data import Source
from dflop_jax.pipeline.executor import Executor
from dflop_jax.plan.predict import held_loads
from dflop_jax.profile.optimizer_state import FLOAT32_BYTES
from dflop_jax.records import Plan, Prices, Profile
from dflop_jax.report.progress import Progress
from dflop_jax.report.run_folder import RunFolder
from dflop_jax.report.wording import duration, number
from dflop_jax.schedule.online import schedule_batch
from dflop_jax.sim.pipeline import simulate_schedules
from dflop_jax.train.callbacks import Callbacks
from dflop_jax.train.planning import check_layers, check_names, check_plannable
from dflop_jax.train.prepare import Workplace
from dflop_jax.train.profiling import parameter_bytes, profile_data
from dflop_jax.train.sample_file import SampleFile
from dflop_jax.train.timing import Timed

# Batches of the profiled data whose mean step is what a plan predicts; twice as many are scheduled
# in twice the time, and scatter less by a third.
_PREDICTED_BATCHES = 4


@dataclass(frozen=True)
class ReadyRun:
    """A run before the first of its steps under a plan.

    Attributes:
      held_out: the samples to evaluate on.
      folder, samples: process 0's.
      start_s: what it took to come this far.
      ends_s: when `train.max_hours` are over, by `time.monotonic`.
      callbacks: the user's, that this process calls.
    """

    config: Config
    place: Workplace
    source: Source
    held_out: Source | None
    profile: Profile
    ex: Executor
    prices: Prices
    saver: Checkpointer
    folder: RunFolder | None
    samples: SampleFile | None
    progress: Progress
    start_s: float
    ends_s: float
    callbacks: Callbacks


def agree(config: Config, peers: ProcessGroup) -> None:
    """ValueError unless every process has the same configuration."""
    encoded = msgspec.json.encode(config)
    ours = msgspec.json.decode(encoded)
    theirs = msgspec.json.decode(peers.broadcast("config", encoded))
    for name, value in theirs.items():
        if name not in ("distributed", "cache_dir") and ours[name] != value:
            raise ValueError(
                f"process {peers.process} was started with {name}={ours[name]}, process 0 "
                f"with {value}; start all with the same configuration"
            )


def workplace_line(place: Workplace) -> str:
    """Devices and model of a run, in a line."""
    if place.hardware:
        devices = f"{place.n_devices} x {place.hardware.name}, which are not here"
    else:
        kinds = sorted({d.device_kind for d in place.devices})
        hosts = len(set(place.hosts)) or 1
        devices = f"{place.n_devices} x {', '.join(kinds)}"
        devices += f" of {place.peers.count} processes on {hosts} hosts" * (place.peers.count > 1)
    sizes: Counter[str] = Counter()
    for module in place.model.modules.values():
        for part, n_bytes in parameter_bytes(module).items():
            sizes[module.freeze_groups[part]] += round(n_bytes / FLOAT32_BYTES)
    by_use = {"trained": place.trained.rates, "frozen": place.trained.frozen}
    parameters = "; ".join(
        f"{use} " + ", ".join(f"{group} {number(sizes[group])}" for group in groups)
        for use, groups in by_use.items()
        if groups
    )
    config = place.config.model
    return (
        f"devices: {devices}; model: {config.factory} {config.size}, "
        f"{config.dtype}; parameters: {parameters}"
    )


def data_line(source: Source, train: TrainConfig, asked_batch: int) -> str:
    """Data and steps of a run, in a line.

    Args:
      train: of the steps as they are run (`prepare.in_steps`).
      asked_batch: the global batch before it was lowered to the samples that there are.
    """
    n, batch = len(source), train.global_batch
    lowered = f" (train.global_batch {asked_batch} is lowered, there are no more)"
    return (
        f"data: {source.name}: {n:,} samples; {train.steps:,} steps of {batch} samples"
        f"{lowered * (batch < asked_batch)}, {number(train.steps * batch / n)} epochs"
    )


def expected(plan: Plan, steps: int) -> str:
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


def refuse(place: Workplace, source: Source, profile: Profile | None, plan: Plan | None) -> None:
    """ValueError, before anything is measured, for what no measurement would change."""
    if profile is not None:
        check_layers(place, profile, "the profile", "profile again")
    elif plan is None:
        check_plannable(place)
    if plan is not None:
        check_names(place)
        if profile is None and place.peers.is_hub:
            held_loads(plan, profile_data(place, source).loads)


def predicted(place: Workplace, profile: Profile, prices: Prices, timed: Timed) -> Plan:
    """The plan of the timed programs, its predictions made anew from their times; its batches are
    scheduled by `prices`."""
    ex, n = timed.executor, place.config.train.global_batch
    plan = ex.plan
    loads = held_loads(plan, profile.data.loads)
    batches = [
        [loads[(k * n + i) % len(loads)] for i in range(n)] for k in range(_PREDICTED_BATCHES)
    ]
    schedules = [
        schedule_batch(b, plan, prices, ex.trainable, step=k) for k, b in enumerate(batches)
    ]
    # Those that the plan was chosen by were timed on a state that was not needed.
    measured = replace(timed.prices(profile.model), step_end=prices.step_end)
    trace = simulate_schedules(plan, schedules, measured, ex.trainable, awaited=ex.awaited)
    busy = trace.busy_fraction()  # of links too
    figures = replace(
        plan.predicted,
        makespan_s=trace.makespan_s / len(batches),
        busy_fraction={m.name: busy.get(m.name, 0.0) for m in plan.layout.submeshes},
        chosen_by_s=plan.predicted.chosen_by_s or mean(s.makespan_s for s in schedules),
    )
    return replace(plan, predicted=figures)
