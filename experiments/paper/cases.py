"""What every system is asked about: a model, its data and its devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from dflop_jax.contract import MultimodalModel
from dflop_jax.hardware import find_hardware
from dflop_jax.records import DataProfile, Hardware, Load, Plan, Schedule

H100 = find_hardware("h100")
MEMORY_SHARE = 0.95  # of a device's memory; the rest is the framework's
SEEN, TAIL = 4_000, 64  # samples that planners know, and the largest of those that are reported
TUNING = 8  # global batches that systems with true shapes are tuned on, of large ones 1
_LARGE_BATCH = 1_024  # samples; of larger batches one is reported, since they differ less
_TUNED = 100  # seed of the first batch that systems are tuned on


@dataclass(frozen=True)
class Case:
    """A model on devices. `loads(n, seed)` draws samples in arrival order; `batches` are reported
    where they are not large."""

    name: str
    model: Callable[[], MultimodalModel]
    loads: Callable[[int, int], list[Load]]
    n_devices: int
    global_batch: int
    hardware: Hardware = H100
    batches: int = 2

    @property
    def n_reported(self) -> int:
        """Global batches that are simulated."""
        return 1 if self.global_batch > _LARGE_BATCH else self.batches

    @property
    def memory_bytes(self) -> float:
        """What a device's plan may take."""
        return MEMORY_SHARE * self.hardware.memory_bytes


@dataclass(frozen=True)
class Step:
    """A reported batch as it was scheduled and simulated: `busy_s` are the seconds that each
    segment computes, on average over its data ranks. Where shapes are true, `plan` has those of
    this step, and `schedule` is that of the slowest replica."""

    plan: Plan
    schedule: Schedule
    makespan_s: float
    busy_s: Mapping[str, float]

    @property
    def idle_share(self) -> float:
        """Of the devices' time: that in which they compute nothing."""
        spent_s = sum(
            self.busy_s[s.name] * self.plan.layout.submesh(s.submesh).n_devices
            for s in self.plan.layout.segments
        )
        return 1 - spent_s / (self.plan.layout.n_devices * self.makespan_s)


@cache
def seen(case: Case) -> DataProfile:
    """What the planner knows of the data: samples, and the largest of those that are reported."""
    known = case.loads(SEEN, 0)
    every = [*known, *(load for batch in reported(case) for load in batch)]
    tail = {
        i
        for m in case.model().modules
        for i in sorted(range(len(every)), key=lambda i: -every[i].tokens(m))[:TAIL]
    }
    return DataProfile(case.name, len(every), tuple(known), tuple(every[i] for i in sorted(tail)))


@cache
def reported(case: Case) -> tuple[tuple[Load, ...], ...]:
    """Global batches that are simulated, none of which a system is chosen by."""
    return tuple(tuple(case.loads(case.global_batch, 1 + i)) for i in range(case.n_reported))


@cache
def tuning(case: Case) -> tuple[tuple[Load, ...], ...]:
    """Global batches that systems with true shapes are chosen by."""
    n = 1 if case.global_batch > _LARGE_BATCH else TUNING
    return tuple(tuple(case.loads(case.global_batch, _TUNED + i)) for i in range(n))
