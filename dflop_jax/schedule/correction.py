"""Adaptive correction: ratios of observed to predicted task times, applied to the prices of later
schedules.

DFLOP (arXiv 2603.25120, Adaptive Correction) penalises shapes that deviate from their profile and
monitors only while the predicted gain exceeds the overhead; its exact rules were not available.
Here, every program (segment, static shape, direction) has a factor: the median ratio over the last
sampled steps. `Monitor` states the rule for sampling. All functions are pure.

A sampled step leaves a `StepSample`: its measurements, and the first step whose batch was scheduled
with them. Everything else follows from the samples, so a run that reads the samples of another run
under the same prices schedules every batch alike without measuring.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, isfinite, log
from statistics import mean, median

import msgspec

from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Layout,
    Load,
    Plan,
    PriceList,
    Prices,
    ProgramId,
    Schedule,
    Task,
    Trace,
)
from dflop_jax.records.data import require
from dflop_jax.schedule.batch import Batch
from dflop_jax.schedule.batch_scheduler import assign_groups
from dflop_jax.simulate.steps import simulate_step, task_seconds
from dflop_jax.simulate.task_graph import segment_resources

# Sampled steps over which a factor is the median; twice as many follow a change half as fast.
_HISTORY_STEPS = 9
# Prior samples of ratio 1: one more equal sample than these outweighs a prediction.
_PRIOR_STEPS = 2
# First steps of a run that are not sampled. With cold caches and batches being solved ahead they
# take up to twice as long, and their shapes would look slow. Twice as many delay the first
# correction.
_WARMUP_STEPS = 2


@dataclass(frozen=True)
class Correction:
    """For each program (`program_key`), log(observed / predicted) of the last sampled steps that
    ran it, oldest first. A program without samples keeps its predicted price."""

    logs: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def log_factor(self, program: str) -> float:
        """The median over the last samples and `_PRIOR_STEPS` samples of ratio 1. Three equal
        samples outweigh a prediction; one outlier does not."""
        ratios = self.logs.get(program, ())
        return median((*ratios, *[0.0] * _PRIOR_STEPS)) if ratios else 0.0

    def factor(self, program: str) -> float:
        return exp(self.log_factor(program))

    @property
    def deviation(self) -> float:
        """The largest factor, up or down, less 1; 0 if every prediction is right."""
        return exp(max((abs(self.log_factor(p)) for p in self.logs), default=0.0)) - 1


def program_key(program: ProgramId) -> str:
    """The key of a program in JSON. Buckets with the same shape of a module share its program and
    its correction."""
    policy_suffix = "/remat_less" * program.remat_less
    return f"{program.segment}/{program.shape.name}/{program.direction}{policy_suffix}"


def task_times(trace: Trace, schedule: Schedule) -> dict[ProgramId, tuple[float, ...]]:
    """Seconds of every run of each program in a step's trace."""
    times: dict[ProgramId, tuple[float, ...]] = {}
    for e in trace.events:
        if e.direction == FORWARD or e.direction == BACKWARD:
            program = ProgramId.for_task(
                Task(e.segment, e.group, e.direction), schedule.groups[e.group]
            )
            times[program] = (*times.get(program, ()), e.end_s - e.start_s)
    return times


def log_ratios(
    layout: Layout,
    observed: Mapping[ProgramId, Sequence[float]],
    predicted: Mapping[ProgramId, float],
) -> dict[str, float]:
    """By program, the median of log(observed / predicted) over its runs in a step. Programs of
    segments that the plan lacks are left out.

    Args:
      observed: seconds of each program, one entry per run in the step.
      predicted: uncorrected seconds of the same programs.
    """
    segments = {s.name for s in layout.segments}
    by_program: dict[str, float] = {}
    for program, runs in observed.items():
        predicted_s = predicted.get(program, 0.0)
        ratios = [log(run_s / predicted_s) for run_s in runs if run_s > 0 < predicted_s]
        if ratios and program.segment in segments:
            by_program[program_key(program)] = median(ratios)
    return by_program


def add_ratios(correction: Correction, ratios: Mapping[str, float]) -> Correction:
    """The correction after one more sampled step, which counts once for each program that it
    ran."""
    logs = dict(correction.logs)
    for name, ratio in ratios.items():
        logs[name] = (*logs.get(name, ()), ratio)[-_HISTORY_STEPS:]
    return Correction(logs)


def correct_prices(prices: Prices, correction: Correction) -> Prices:
    """The prices times the factors of their programs. No price falls below the host's work for a
    task."""
    programs = {}
    for program, price in prices.programs.items():
        factor = correction.factor(program_key(program))
        min_s = min(price.static_s, prices.host_s)
        programs[program] = price.scaled(factor, min_s)
    return replace(prices, programs=programs)


def expected_times(
    plan: Plan, schedule: Schedule, prices: Prices, trainable: Collection[str]
) -> dict[ProgramId, float]:
    """Mean seconds that each program of a schedule should be observed to take: those of its tasks
    in a simulation, including the slowdown by tasks that run at the same time.

    If the host dispatches on the devices' own cores, dispatch runs ahead, so a task is slowed down
    by what is dispatched while it runs: in proportion to its device seconds, not by its own
    dispatch. Otherwise corrections would move the price of the host's work from short programs to
    long ones.
    """
    trace = simulate_step(plan, schedule, prices, trainable)
    seconds = task_seconds(schedule, prices)
    host_s = prices.host_s if prices.shares_cores else 0.0
    resource_of = segment_resources(plan.layout)
    busy_s = [0.0] * (max(resource_of.values()) + 1)
    device_s = list(busy_s)
    events = []
    for e in trace.events:
        if e.direction == FORWARD or e.direction == BACKWARD:
            task_s = seconds(Task(e.segment, e.group, e.direction))
            simulated_s = e.end_s - e.start_s
            device_share = max(1 - host_s / task_s, 0.0) if task_s else 1.0
            busy_s[resource_of[e.segment]] += simulated_s
            device_s[resource_of[e.segment]] += simulated_s * device_share
            events.append(replace(e, start_s=0.0, end_s=simulated_s * device_share))
    expected: dict[ProgramId, float] = {}
    for program, runs in task_times(replace(trace, events=tuple(events)), schedule).items():
        r = resource_of[program.segment]
        expected[program] = mean(runs) * busy_s[r] / device_s[r] if device_s[r] else 0.0
    return expected


def predicted_gain_s(
    loads: Sequence[Load],
    plan: Plan,
    old_prices: Prices,
    new_prices: Prices,
    trainable: Collection[str],
    *,
    work: int = 400,
) -> float:
    """Seconds saved by grouping a global batch by `new_prices` instead of `old_prices`; both
    schedules are simulated by `new_prices`.

    Orders are those of list scheduling. A searched order would also fit the noise of measured
    times, which is no gain.
    """
    batch = Batch(loads, plan.layout.modules)

    def simulated_s(prices: Prices) -> float:
        schedule = assign_groups(batch, plan, prices, trainable, work, 0).schedule
        return simulate_step(plan, schedule, new_prices, trainable).makespan_s

    return max(0.0, simulated_s(old_prices) - simulated_s(new_prices))


@dataclass(frozen=True)
class Monitor:
    """Whether to sample task times: sampling is on while it pays.

    Sampling costs `overhead_s` per step. Its expected benefit is the predicted gain of the
    corrections (`predicted_gain_s`) times the share of them learnt in the last window; older
    corrections stay in use for free. Sampling goes off when this benefit is below the overhead over
    a full window. It comes back for one window after `recheck_every` steps; each time nothing is
    found, the pause doubles, up to `max_every`. No step is sampled while the gain of a full window
    is being predicted.

    Attributes:
      steps: sampled in this window.
      next_step: when off, the step at which sampling resumes.
    """

    window: int = 8
    recheck_every: int = 50
    max_every: int = 800
    on: bool = True
    steps: int = 0
    next_step: int = 0
    every: int = 0
    before: Correction = field(default_factory=Correction)


def is_sampling(monitor: Monitor, step: int) -> bool:
    """Whether the task times of this step are sampled."""
    return not is_full(monitor) and (monitor.on or step >= monitor.next_step)


def is_full(monitor: Monitor) -> bool:
    """Whether the window is full, so that the next decision is due."""
    return monitor.on and monitor.steps >= monitor.window


def count_sampled_step(monitor: Monitor) -> Monitor:
    """The monitor after one more sampled step. The first one while sampling was off starts a
    re-check."""
    assert not is_full(monitor)
    return replace(monitor, on=True, steps=monitor.steps + 1 if monitor.on else 1)


def decide_sampling(
    monitor: Monitor, step: int, correction: Correction, *, gain_s: float, overhead_s: float
) -> Monitor:
    """The monitor after a full window.

    Args:
      step: the last one that was sampled.
      correction: what is known after the ratios of that step were added.
      gain_s: predicted seconds a step that using `correction` saves (>= 0), see `Monitor`.
      overhead_s: measured seconds that sampling adds to a step.
    """
    assert is_full(monitor)
    if learnt_gain_s(gain_s, monitor.before, correction) > overhead_s:
        return replace(monitor, steps=0, every=0, before=correction)
    pause = min(monitor.max_every, 2 * monitor.every) if monitor.every else monitor.recheck_every
    return replace(monitor, on=False, next_step=step + pause, every=pause, before=correction)


def learnt_gain_s(gain_s: float, earlier: Correction, current: Correction) -> float:
    """The part of the gain that is due to what was learnt since `earlier`: the largest change of a
    factor over the largest deviation of a factor from 1."""
    changes = (abs(current.log_factor(p) - earlier.log_factor(p)) for p in current.logs)
    change = max(changes, default=0.0)
    deviation = max((abs(current.log_factor(p)) for p in current.logs), default=0.0)
    return gain_s * min(1.0, change / deviation) if deviation else 0.0


@dataclass(frozen=True)
class StepSample:
    """The measurements of a sampled step.

    Attributes:
      first: the first step whose batch is scheduled with this sample.
      prices: `price_digest` of the predictions.
      ratios: log(observed / predicted) by program.
      gain_s, overhead_s: the figures of the last decision, see `decide_sampling`; 0 in the first
        window.
    """

    step: int
    first: int
    prices: str
    ratios: dict[str, float]
    gain_s: float
    overhead_s: float

    def __post_init__(self) -> None:
        require(0 <= self.step < self.first, f"a sample needs 0 <= step < first, got {self.step}")
        numbers = (*self.ratios.values(), self.gain_s, self.overhead_s)
        require(all(map(isfinite, numbers)), "a sample's numbers must be finite")


@dataclass(frozen=True)
class CorrectionChange:
    """From step `first` on, batches are scheduled by prices with this correction."""

    first: int
    state: Correction


@dataclass(frozen=True)
class CorrectionState:
    """What was learnt under the prices of this digest: the correction, the monitor, the last
    sampled step, and the corrections of upcoming steps, oldest first."""

    prices: str
    state: Correction = field(default_factory=Correction)
    monitor: Monitor = field(default_factory=lambda: Monitor(on=False, next_step=_WARMUP_STEPS))
    last: int = -1
    changes: tuple[CorrectionChange, ...] = ()


def price_digest(prices: Prices) -> str:
    """A digest of prices; equal for equal prices."""
    price_list = PriceList.from_prices(prices)
    encoded = [
        sorted(map(msgspec.json.encode, pairs))
        for pairs in (price_list.programs, price_list.step_end, price_list.sends)
    ]
    encoded.append([msgspec.json.encode(price_list.concurrency)])
    if price_list.host_s:  # prices of older runs have none
        encoded.append([msgspec.json.encode((price_list.host_s, price_list.shares_cores))])
    return hashlib.sha256(b"\n".join(b"".join(rows) for rows in encoded)).hexdigest()[:16]


def add_sample(old: CorrectionState, sample: StepSample) -> CorrectionState:
    """The state after a sampled step. A sample that starts a window also carries the decision after
    the window before."""
    if is_full(old.monitor):
        old = with_decision(old, sample.gain_s, sample.overhead_s)
    correction = add_ratios(old.state, sample.ratios)
    changes = (*old.changes, CorrectionChange(sample.first, correction))
    monitor = count_sampled_step(old.monitor)
    return CorrectionState(old.prices, correction, monitor, sample.step, changes)


def with_decision(state: CorrectionState, gain_s: float, overhead_s: float) -> CorrectionState:
    """The state after the decision on a full window, whose gain is now known."""
    monitor = decide_sampling(
        state.monitor, state.last, state.state, gain_s=gain_s, overhead_s=overhead_s
    )
    return replace(state, monitor=monitor)


def replay_samples(
    state: CorrectionState, samples: Iterable[StepSample], step: int = 0
) -> CorrectionState:
    """The state after the samples that are new to it and under its prices. Changes that only
    concern steps before `step` are dropped."""
    for sample in samples:
        if sample.prices == state.prices and sample.step > state.last:
            state = drop_old_changes(add_sample(state, sample), step)
    return state


def drop_old_changes(state: CorrectionState, step: int) -> CorrectionState:
    """The state without the changes that concern only steps before `step`."""
    needed: list[CorrectionChange] = []
    for change in reversed(state.changes):
        needed.append(change)
        if change.first <= step:
            break
    return replace(state, changes=tuple(reversed(needed)))


def price_changes(prices: Prices, state: CorrectionState) -> dict[int, Prices]:
    """The prices of upcoming steps by the first step that they hold for. If several concern a step,
    the last one learnt holds."""
    by_step: dict[int, Prices] = {}
    for change in state.changes:
        by_step = {first: p for first, p in by_step.items() if first < change.first}
        by_step[change.first] = correct_prices(prices, change.state)
    return by_step
