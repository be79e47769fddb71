"""Adaptive correction: observed over predicted task times, fed back into later schedules.

DFLOP (arXiv 2603.25120, Adaptive Correction) penalises shapes that deviate from their profile and
keeps monitoring on only while the predicted gain exceeds its overhead; the exact rules were not
available. Here a factor per program (segment, static shape, direction) follows the median ratio of
each sampled step, and `Monitor` decides by the rule stated there. State goes in and out; all pure.

A sampled step leaves a `StepSample`: what was measured of it, and the first step whose batch was
scheduled with it. All else follows by pure functions, so a run that reads the samples of another
under the same prices schedules every batch alike, without measuring anything.
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
from dflop_jax.records.check import require
from dflop_jax.schedule.batch import Batch
from dflop_jax.schedule.batch_scheduler import assign_groups
from dflop_jax.simulate.steps import simulate_step
from dflop_jax.simulate.task_graph import segment_resources

# Sampled steps whose median is a factor; twice as many follow a change half as fast.
_HISTORY_STEPS = 9
# Steps in which a prediction was right, imagined before the first sample: so many plus one like
# samples outweigh a prediction.
_PRIOR_STEPS = 2
# Steps of a run that are not sampled: while caches are cold and several batches are solved ahead
# they take up to twice as long, and the shapes that they happen to run would look slow ever after.
# Twice as many delay the first correction by as many steps.
_WARMUP_STEPS = 2


@dataclass(frozen=True)
class Correction:
    """What is known of each program (`program_key`): log(observed / predicted) of the last sampled
    steps that ran it, oldest first; a program without any is trusted as predicted."""

    logs: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def log_factor(self, program: str) -> float:
        """Median over the last steps and `_IMAGINED_STEPS` more in which the prediction was right:
        three like samples outweigh a prediction, one hiccup does not."""
        ratios = self.logs.get(program, ())
        return median((*ratios, *[0.0] * _PRIOR_STEPS)) if ratios else 0.0

    def factor(self, program: str) -> float:
        return exp(self.log_factor(program))

    @property
    def deviation(self) -> float:
        """Largest factor, up or down, less 1: 0 when every prediction is right."""
        return exp(max((abs(self.log_factor(p)) for p in self.logs), default=0.0)) - 1


def program_key(program: ProgramId) -> str:
    """Key of a program in the state's JSON. Buckets that share a module's shape share its program,
    and what was learnt of it."""
    policy_suffix = "/remat_less" * program.remat_less
    return f"{program.segment}/{program.shape.name}/{program.direction}{policy_suffix}"


def task_times(trace: Trace, schedule: Schedule) -> dict[ProgramId, tuple[float, ...]]:
    """Seconds of every run of each program that a step's trace shows."""
    times: dict[ProgramId, tuple[float, ...]] = {}
    for e in trace.events:
        if e.direction == FORWARD or e.direction == BACKWARD:
            program = ProgramId.of(Task(e.segment, e.group, e.direction), schedule.groups[e.group])
            times[program] = (*times.get(program, ()), e.end_s - e.start_s)
    return times


def log_ratios(
    layout: Layout,
    observed: Mapping[ProgramId, Sequence[float]],
    predicted: Mapping[ProgramId, float],
) -> dict[str, float]:
    """log(observed / predicted) of a step by program, the median of its runs; programs of segments
    that the plan lacks are left out.

    Args:
      observed: seconds of each program, one entry per run in the step.
      predicted: uncorrected seconds of the same.
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
    """The state after one more sampled step, which counts once for each program that it ran."""
    logs = dict(correction.logs)
    for name, ratio in ratios.items():
        logs[name] = (*logs.get(name, ()), ratio)[-_HISTORY_STEPS:]
    return Correction(logs)


def correct_prices(prices: Prices, correction: Correction) -> Prices:
    """The prices with what was learnt of each program applied; none falls below the work of the
    host for a task."""
    programs = {}
    for program, price in prices.programs.items():
        factor = correction.factor(program_key(program))
        min_s = min(price.static_s, prices.host_s)
        programs[program] = price.scaled(factor, min_s)
    return replace(prices, programs=programs)


def expected_times(
    plan: Plan, schedule: Schedule, prices: Prices, trainable: Collection[str]
) -> dict[ProgramId, float]:
    """Mean seconds that each program of a schedule should be seen to take: those of its tasks in a
    simulation, among the tasks that run beside it.

    Where the host's work is done in the devices' place, a task is seen to take longer not by its
    own share, since dispatch runs ahead, but by what is dispatched meanwhile: in proportion to its
    seconds on the device. Else corrections would move the price of the host's work from short
    programs to long ones.
    """
    trace = simulate_step(plan, schedule, prices, trainable)
    host_s = prices.host_s if prices.shares_cores else 0.0
    resource_of = segment_resources(plan.layout)
    busy_s = [0.0] * (max(resource_of.values()) + 1)
    device_s = list(busy_s)
    events = []
    for e in trace.events:
        if e.direction == FORWARD or e.direction == BACKWARD:
            task_s = prices.task_s(plan.layout, schedule, Task(e.segment, e.group, e.direction))
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
    """Seconds that grouping a global batch by `new_prices` instead of `old_prices` saves, both
    schedules simulated by `new_prices` (the corrected prices).

    Orders are those of list scheduling: a searched one fits the scatter of measured times as well,
    which is no gain.
    """
    batch = Batch(loads, plan.layout.modules)

    def simulated_s(prices: Prices) -> float:
        schedule = assign_groups(batch, plan, prices, trainable, work, 0).schedule
        return simulate_step(plan, schedule, new_prices, trainable).makespan_s

    return max(0.0, simulated_s(old_prices) - simulated_s(new_prices))


@dataclass(frozen=True)
class Monitor:
    """Whether to sample stage times: on while that pays.

    Sampling costs `overhead_s` a step. What it can still bring is the predicted gain of the
    corrections (`predicted_gain_s`) times the share of them learnt in the last window: corrections
    learnt before stay in use for free. Sampling goes off when, over a full window, that is below
    the overhead; it comes back for one window after `recheck_every` steps, and each time that finds
    nothing the pause doubles, up to `max_every`.

    While the gain of a full window is being predicted no step is sampled.

    steps: sampled in this window. next_step: when off, the step at which sampling resumes.
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
    """Whether the stage times of this step are to be sampled."""
    return not is_full(monitor) and (monitor.on or step >= monitor.next_step)


def is_full(monitor: Monitor) -> bool:
    """Whether the window is full, so that it is to be decided whether to sample on."""
    return monitor.on and monitor.steps >= monitor.window


def count_sampled_step(monitor: Monitor) -> Monitor:
    """The monitor after one more sampled step; the first while it was off begins a re-check."""
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
    """How much of the gain that corrections bring is of what was learnt since `earlier`: how far
    the farthest-moved factor moved, over how far the farthest is from 1."""
    changes = (abs(current.log_factor(p) - earlier.log_factor(p)) for p in current.logs)
    change = max(changes, default=0.0)
    deviation = max((abs(current.log_factor(p)) for p in current.logs), default=0.0)
    return gain_s * min(1.0, change / deviation) if deviation else 0.0


@dataclass(frozen=True)
class StepSample:
    """What was measured in a sampled step.

    Attributes:
      first: the first step whose batch is scheduled with what was learnt of this one.
      prices: `price_digest` of the predictions.
      ratios: log(observed / predicted) by program.
      gain_s, overhead_s: by which it was decided after the window before to sample on, see
        `decide_sampling`; 0 in the first window.
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
    """What was learnt under the prices of this digest: the corrections, the monitor, the last
    sampled step, and the changes that steps to come are scheduled by, oldest first."""

    prices: str
    state: Correction = field(default_factory=Correction)
    monitor: Monitor = field(default_factory=lambda: Monitor(on=False, next_step=_WARMUP_STEPS))
    last: int = -1
    changes: tuple[CorrectionChange, ...] = ()


def price_digest(prices: Prices) -> str:
    """Equal for equal prices."""
    price_list = PriceList.of(prices)
    encoded = [
        sorted(map(msgspec.json.encode, pairs))
        for pairs in (price_list.programs, price_list.step_end, price_list.sends)
    ]
    encoded.append([msgspec.json.encode(price_list.concurrency)])
    if price_list.host_s:  # prices of older runs have none
        encoded.append([msgspec.json.encode((price_list.host_s, price_list.shares_cores))])
    return hashlib.sha256(b"\n".join(b"".join(rows) for rows in encoded)).hexdigest()[:16]


def add_sample(old: CorrectionState, sample: StepSample) -> CorrectionState:
    """The state after a sampled step. One that opens a window also tells what was decided after
    the window before."""
    if is_full(old.monitor):
        old = with_decision(old, sample.gain_s, sample.overhead_s)
    correction = add_ratios(old.state, sample.ratios)
    changes = (*old.changes, CorrectionChange(sample.first, correction))
    monitor = count_sampled_step(old.monitor)
    return CorrectionState(old.prices, correction, monitor, sample.step, changes)


def with_decision(state: CorrectionState, gain_s: float, overhead_s: float) -> CorrectionState:
    """The state once the gain of a full window is known."""
    monitor = decide_sampling(
        state.monitor, state.last, state.state, gain_s=gain_s, overhead_s=overhead_s
    )
    return replace(state, monitor=monitor)


def replay_samples(
    state: CorrectionState, samples: Iterable[StepSample], step: int = 0
) -> CorrectionState:
    """The state after those of the samples that are new to it and of its prices, as far as steps
    from `step` on need it."""
    for sample in samples:
        if sample.prices == state.prices and sample.step > state.last:
            state = drop_old_changes(add_sample(state, sample), step)
    return state


def drop_old_changes(state: CorrectionState, step: int) -> CorrectionState:
    """The same without the changes that no step from this one on is scheduled by."""
    needed: list[CorrectionChange] = []
    for change in reversed(state.changes):
        needed.append(change)
        if change.first <= step:
            break
    return replace(state, changes=tuple(reversed(needed)))


def price_changes(prices: Prices, state: CorrectionState) -> dict[int, Prices]:
    """The prices of later steps by the first step that they hold for; where steps have several,
    what was learnt last holds."""
    by_step: dict[int, Prices] = {}
    for change in state.changes:
        by_step = {first: p for first, p in by_step.items() if first < change.first}
        by_step[change.first] = correct_prices(prices, change.state)
    return by_step
