"""Adaptive correction: ratios of observed to predicted task times, applied to the prices of later
schedules.

DFLOP (arXiv 2603.25120, Adaptive Correction) penalises shapes that deviate from their profile and
monitors only while the predicted gain exceeds the overhead; its exact rules were not available.
Here, every program (segment, static shape, direction) has a factor: the median ratio over the last
sampled steps. `CorrectionState` has the rule for sampling. All functions are pure.

A sampled step yields a `StepSample`: its measurements, and the first step whose batch is scheduled
with them. The state follows from the samples alone, so a run that reads another run's samples under
the same prices computes the same schedules without measuring.
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
from dflop_jax.schedule.batch import Batch, capacity_of
from dflop_jax.schedule.batch_scheduler import assign_groups
from dflop_jax.simulate.steps import simulate_step, task_seconds
from dflop_jax.simulate.task_graph import segment_resources

# Number of sampled steps over which a factor is the median, and after which sampling is
# reconsidered; doubling it halves the speed at which factors follow a change.
_HISTORY_STEPS = 9
_PRIOR_STEPS = 2  # prior samples of ratio 1 in every median
# Number of steps at the start of a run that are not sampled: with cold caches and batches being
# solved ahead they take up to twice as long.
_WARMUP_STEPS = 2
_RECHECK_STEPS = 50  # steps of the first pause of sampling


@dataclass(frozen=True)
class Correction:
    """For each program (`program_key`), log(observed / predicted) of the last sampled steps that
    ran it, oldest first. A program without samples keeps its predicted price."""

    logs: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def log_factor(self, program: str) -> float:
        """Return the median over the last samples and `_PRIOR_STEPS` samples of ratio 1."""
        ratios = self.logs.get(program, ())
        return median((*ratios, *[0.0] * _PRIOR_STEPS)) if ratios else 0.0

    def factor(self, program: str) -> float:
        return exp(self.log_factor(program))

    @property
    def max_factor(self) -> float:
        """The largest of all factors and their reciprocals; 1 if every prediction is right."""
        return exp(max((abs(self.log_factor(p)) for p in self.logs), default=0.0))


def program_key(program: ProgramId) -> str:
    """Return the key of a program in JSON."""
    policy_suffix = "/remat_less" * program.remat_less
    return f"{program.segment}/{program.shape.name}/{program.direction}{policy_suffix}"


def task_times(trace: Trace, schedule: Schedule) -> dict[ProgramId, tuple[float, ...]]:
    """Return the seconds of every run of each program in a step's trace."""
    times: dict[ProgramId, tuple[float, ...]] = {}
    for e in trace.events:
        if e.direction == FORWARD or e.direction == BACKWARD:
            task = Task(e.segment, e.group, e.direction)
            program = ProgramId.for_task(task, schedule.groups[e.group])
            times[program] = (*times.get(program, ()), e.end_s - e.start_s)
    return times


def log_ratios(
    observed: Mapping[ProgramId, Sequence[float]], predicted: Mapping[ProgramId, float]
) -> dict[str, float]:
    """Return by program the median of log(observed / predicted seconds) over its runs in a step."""
    by_program: dict[str, float] = {}
    for program, runs in observed.items():
        predicted_s = predicted.get(program, 0.0)
        if ratios := [log(run_s / predicted_s) for run_s in runs if run_s > 0 < predicted_s]:
            by_program[program_key(program)] = median(ratios)
    return by_program


def add_ratios(correction: Correction, ratios: Mapping[str, float]) -> Correction:
    """Return the correction after one more sampled step."""
    logs = dict(correction.logs)
    for name, ratio in ratios.items():
        logs[name] = (*logs.get(name, ()), ratio)[-_HISTORY_STEPS:]
    return Correction(logs)


def correct_prices(prices: Prices, correction: Correction) -> Prices:
    """Return the prices times their factors, but at least the host's work for a task."""
    programs = {
        program: price.scaled(
            correction.factor(program_key(program)), min(price.static_s, prices.host_s)
        )
        for program, price in prices.programs.items()
    }
    return replace(prices, programs=programs)


def expected_times(
    plan: Plan, schedule: Schedule, prices: Prices, trainable: Collection[str]
) -> dict[ProgramId, float]:
    """Return the expected mean of each program's observed seconds, from a simulation. If the host
    dispatches on the devices' own cores, dispatch runs ahead, so its seconds are distributed over
    tasks in proportion to their device seconds. Otherwise corrections would move the price of the
    host's work from short programs to long ones."""
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
    """Return the seconds saved by grouping a global batch by `new_prices` instead of `old_prices`.
    Both schedules are simulated with `new_prices`, in the order of list scheduling: a searched
    order would also fit the noise of measured times, which is no gain."""
    batch = Batch(loads, capacity_of(plan.layout))

    def simulated_s(prices: Prices) -> float:
        schedule = assign_groups(batch, plan, prices, trainable, work, 0).schedule
        return simulate_step(plan, schedule, new_prices, trainable).makespan_s

    return max(0.0, simulated_s(old_prices) - simulated_s(new_prices))


@dataclass(frozen=True)
class StepSample:
    """The measurements of a sampled step."""

    step: int
    first: int  # the first step whose batch is scheduled with this sample
    prices: str  # `price_digest` of the predictions
    ratios: dict[str, float]  # log(observed / predicted) by program
    gain_s: float  # of the last decision, see `with_decision`; 0 in the first window
    overhead_s: float

    def __post_init__(self) -> None:
        require(0 <= self.step < self.first, f"a sample needs 0 <= step < first, got {self.step}")
        numbers = (*self.ratios.values(), self.gain_s, self.overhead_s)
        require(all(map(isfinite, numbers)), "a sample's numbers must be finite")


@dataclass(frozen=True)
class CorrectionState:
    """The corrections learnt under the prices with digest `prices`, and whether to sample times.

    Sampling costs seconds per step. Its benefit is the predicted gain of the corrections
    (`predicted_gain_s`) times the share of them that the last window has learnt; older corrections
    need no sampling. After each full window, sampling stops if its benefit is below its overhead,
    and resumes for one window after a pause, which doubles each time. No step is sampled while the
    gain of a full window is being predicted.
    """

    prices: str
    correction: Correction = field(default_factory=Correction)
    last: int = -1  # the last sampled step
    # (first step that is scheduled with the correction, correction), oldest first.
    changes: tuple[tuple[int, Correction], ...] = ()
    window: int = _HISTORY_STEPS
    is_on: bool = False
    n_sampled: int = 0  # steps in this window
    next_step: int = _WARMUP_STEPS  # when off, the step at which sampling resumes
    pause: int = 0  # steps
    before: Correction = field(default_factory=Correction)  # at the last decision

    @property
    def is_full(self) -> bool:
        """Whether the window is full, so that the next decision is due."""
        return self.n_sampled >= self.window

    def is_sampling(self, step: int) -> bool:
        """Return whether the task times of this step are sampled."""
        return not self.is_full and (self.is_on or step >= self.next_step)


def price_digest(prices: Prices) -> str:
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
    """Return the state after a sampled step. Its sample contains the decision on a full window."""
    if old.is_full:
        old = with_decision(old, sample.gain_s, sample.overhead_s)
    correction = add_ratios(old.correction, sample.ratios)
    return replace(
        old,
        correction=correction,
        last=sample.step,
        changes=(*old.changes, (sample.first, correction)),
        is_on=True,
        n_sampled=old.n_sampled + 1,
    )


def with_decision(state: CorrectionState, gain_s: float, overhead_s: float) -> CorrectionState:
    """Return the state after the decision on a full window.

    Args:
      gain_s: predicted seconds that the correction saves per step (>= 0).
      overhead_s: measured seconds that sampling adds to a step.
    """
    assert state.is_full
    decided = replace(state, n_sampled=0, pause=0, before=state.correction)
    if learnt_gain_s(gain_s, state.before, state.correction) > overhead_s:
        return decided
    pause = 2 * state.pause or _RECHECK_STEPS
    return replace(decided, is_on=False, next_step=state.last + pause, pause=pause)


def learnt_gain_s(gain_s: float, earlier: Correction, current: Correction) -> float:
    """Return the part of the gain that was learnt since `earlier`: the largest change of a factor
    divided by the largest deviation of a factor from 1, both logarithmic."""
    changes = (abs(current.log_factor(p) - earlier.log_factor(p)) for p in current.logs)
    deviation = log(current.max_factor)
    return gain_s * min(1.0, max(changes, default=0.0) / deviation) if deviation else 0.0


def replay_samples(
    state: CorrectionState, samples: Iterable[StepSample], step: int = 0
) -> CorrectionState:
    """Return the state after all samples newer than it, without changes of steps before `step`."""
    for sample in samples:
        if sample.prices == state.prices and sample.step > state.last:
            state = drop_old_changes(add_sample(state, sample), step)
    return state


def drop_old_changes(state: CorrectionState, step: int) -> CorrectionState:
    """Return the state without the changes that concern only steps before `step`."""
    needed_from = max((i for i, (first, _) in enumerate(state.changes) if first <= step), default=0)
    return replace(state, changes=state.changes[needed_from:])


def price_changes(prices: Prices, state: CorrectionState) -> dict[int, Prices]:
    """Return the prices of upcoming steps by the first step that uses them."""
    by_step: dict[int, Prices] = {}
    for first, correction in state.changes:
        by_step = {step: p for step, p in by_step.items() if step < first}
        by_step[first] = correct_prices(prices, correction)
    return by_step
