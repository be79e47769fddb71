"""What a run has learnt of its prices, as records from which another takes the same decisions.

A sampled step leaves a `StepSample`: what was measured of it, and the first step whose batch was
scheduled with it. All else follows by pure functions, so a run that reads the samples of another
under the same prices schedules every batch alike, without measuring anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import isfinite

import msgspec

from dflop_jax.records import PriceList, Prices
from dflop_jax.records.check import require
from dflop_jax.schedule.correction import (
    Correction,
    Monitor,
    corrected,
    decide,
    is_full,
    with_ratios,
    with_step,
)

# Steps of a run that are not sampled: while caches are cold and several batches are solved ahead
# they take up to twice as long, and the shapes that they happen to run would look slow ever after.
# Twice as many delay the first correction by as many steps.
_WARMUP_STEPS = 2


@dataclass(frozen=True)
class StepSample:
    """What was measured in a sampled step.

    Attributes:
      first: the first step whose batch is scheduled with what was learnt of this one.
      prices: `digest` of the predictions.
      ratios: log(observed / predicted) by program.
      gain_s, overhead_s: by which it was decided after the window before to sample on, see
        `correction.decide`; 0 in the first window.
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
class Learnt:
    """What was learnt under the prices of this digest: the corrections, the monitor, the last
    sampled step, and the changes that steps to come are scheduled by, oldest first."""

    prices: str
    state: Correction = field(default_factory=Correction)
    monitor: Monitor = field(default_factory=lambda: Monitor(on=False, next_step=_WARMUP_STEPS))
    last: int = -1
    changes: tuple[CorrectionChange, ...] = ()


def digest(prices: Prices) -> str:
    """Equal for equal prices."""
    listed = PriceList.of(prices)
    parts = [
        sorted(map(msgspec.json.encode, pairs))
        for pairs in (listed.programs, listed.step_end, listed.sends)
    ]
    parts.append([msgspec.json.encode(listed.concurrency)])
    if listed.host_s:  # prices of older runs have none
        parts.append([msgspec.json.encode((listed.host_s, listed.shares_cores))])
    return hashlib.sha256(b"\n".join(b"".join(part) for part in parts)).hexdigest()[:16]


def learn(learnt: Learnt, sample: StepSample) -> Learnt:
    """The state after a sampled step. One that opens a window also tells what was decided after
    the window before."""
    if is_full(learnt.monitor):
        learnt = decided(learnt, sample.gain_s, sample.overhead_s)
    state = with_ratios(learnt.state, sample.ratios)
    changes = (*learnt.changes, CorrectionChange(sample.first, state))
    return Learnt(learnt.prices, state, with_step(learnt.monitor), sample.step, changes)


def decided(learnt: Learnt, gain_s: float, overhead_s: float) -> Learnt:
    """The state once the gain of a full window is known."""
    monitor = decide(
        learnt.monitor, learnt.last, learnt.state, gain_s=gain_s, overhead_s=overhead_s
    )
    return replace(learnt, monitor=monitor)


def replay(learnt: Learnt, samples: Iterable[StepSample], step: int = 0) -> Learnt:
    """The state after those of the samples that are new to it and of its prices, as far as steps
    from `step` on need it."""
    for sample in samples:
        if sample.prices == learnt.prices and sample.step > learnt.last:
            learnt = needed_from(learn(learnt, sample), step)
    return learnt


def needed_from(learnt: Learnt, step: int) -> Learnt:
    """The same without the changes that no step from this one on is scheduled by."""
    needed: list[CorrectionChange] = []
    for change in reversed(learnt.changes):
        needed.append(change)
        if change.first <= step:
            break
    return replace(learnt, changes=tuple(reversed(needed)))


def price_changes(prices: Prices, learnt: Learnt) -> dict[int, Prices]:
    """The prices of later steps by the first step that they hold for; where steps have several,
    what was learnt last holds."""
    by_step: dict[int, Prices] = {}
    for change in learnt.changes:
        by_step = {first: p for first, p in by_step.items() if first < change.first}
        by_step[change.first] = corrected(prices, change.state)
    return by_step
