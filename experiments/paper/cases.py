"""A case that every system is evaluated on: a model, its data and its devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from dflop_jax.contract import MultimodalModel
from dflop_jax.hardware import find_hardware
from dflop_jax.records import DataProfile, Hardware, Load, Plan, Schedule

H100 = find_hardware("h100")
MEMORY_SHARE = 0.95  # of device memory; the framework needs the rest
PROFILE_SAMPLES, TAIL_SAMPLES = 4_000, 64  # random samples, and the largest evaluated ones
TUNING_BATCHES = 8  # global batches that tune systems with dynamic shapes


@dataclass(frozen=True)
class Case:
    """A model on devices. `draw_loads(n, seed)` draws samples in arrival order. Cases with one of
    `batches` to evaluate have large batches, which vary little, and also tune on a single one."""

    name: str
    model: Callable[[], MultimodalModel]
    draw_loads: Callable[[int, int], list[Load]]
    n_devices: int
    global_batch: int
    hardware: Hardware = H100
    batches: int = 2

    @property
    def memory_bytes(self) -> float:
        """Bytes of each device that a plan may use."""
        return MEMORY_SHARE * self.hardware.memory_bytes


@dataclass(frozen=True)
class Step:
    """A scheduled and simulated batch. `busy_s` has the mean computing seconds of each segment
    over its data ranks. With dynamic shapes, `plan` has the shapes of this step and `schedule`
    belongs to the slowest replica."""

    plan: Plan
    schedule: Schedule
    makespan_s: float
    busy_s: Mapping[str, float]

    @property
    def idle_share(self) -> float:
        """Share of device time without computation."""
        busy_device_s = sum(
            self.busy_s[s.name] * self.plan.layout.submesh(s.submesh).n_devices
            for s in self.plan.layout.segments
        )
        return 1 - busy_device_s / (self.plan.layout.n_devices * self.makespan_s)


@cache
def profile_data(case: Case) -> DataProfile:
    """The planner's data profile: random samples, and the largest samples of evaluation batches."""
    samples = case.draw_loads(PROFILE_SAMPLES, 0)
    candidates = [*samples, *(load for batch in evaluation_batches(case) for load in batch)]
    tail_indices = {
        i
        for m in case.model().modules
        for i in sorted(range(len(candidates)), key=lambda i: -candidates[i].tokens(m))[
            :TAIL_SAMPLES
        ]
    }
    return DataProfile(
        case.name,
        len(candidates),
        tuple(samples),
        tuple(candidates[i] for i in sorted(tail_indices)),
    )


@cache
def evaluation_batches(case: Case) -> tuple[tuple[Load, ...], ...]:
    """Global batches that evaluate systems; they never tune one."""
    return tuple(tuple(case.draw_loads(case.global_batch, 1 + i)) for i in range(case.batches))


@cache
def tuning_batches(case: Case) -> tuple[tuple[Load, ...], ...]:
    """Global batches that tune systems with dynamic shapes; seeds begin at 100."""
    n = TUNING_BATCHES if case.batches > 1 else 1
    return tuple(tuple(case.draw_loads(case.global_batch, 100 + i)) for i in range(n))
