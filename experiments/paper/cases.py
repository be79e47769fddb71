"""A case that every system is evaluated on: a model, its data and its devices."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from dflop_jax.contract import MultimodalModel
from dflop_jax.hardware import find_hardware
from dflop_jax.records import DataProfile, Hardware, Load, Plan, Remat, Schedule

H100 = find_hardware("h100")
MEMORY_SHARE = 0.95  # of device memory; the framework needs the rest
# Random samples of the planner's data profile, and the largest of so many other samples.
PROFILE_SAMPLES, TAIL_SAMPLES, POPULATION_SAMPLES = 4_000, 64, 20_000
TUNING_BATCHES = 8  # global batches that tune systems with dynamic shapes
# Uses of drawn samples -> the seed of the first draw. No two uses share a seed.
SEEDS = {"profile": 0, "evaluation": 1, "tuning": 100, "replacement": 200}


@dataclass(frozen=True)
class Untuned:
    """A baseline's configuration as its paper states it: pipeline stages with equal numbers of
    layers, and recompute policies. The first of each that fit into memory are used."""

    stages: tuple[int, ...]
    remats: tuple[Remat, ...]


@dataclass(frozen=True)
class Case:
    """A model on devices. `draw_loads(n, seed)` draws samples in arrival order. Cases with one of
    `batches` to evaluate have large batches, which vary little, and also tune on a single one.
    `untuned` is None where the paper states no configuration of its baseline."""

    name: str
    model: Callable[[], MultimodalModel]
    draw_loads: Callable[[int, int], list[Load]]
    n_devices: int
    global_batch: int
    hardware: Hardware = H100
    batches: int = 2
    untuned: Untuned | None = None

    @property
    def memory_bytes(self) -> float:
        """Bytes of each device that a plan may use."""
        return MEMORY_SHARE * self.hardware.memory_bytes


@dataclass(frozen=True)
class Step:
    """A scheduled and simulated batch of `loads`. `busy_s` has the mean computing seconds of each
    segment over its data ranks. With dynamic shapes, `plan` has the shapes of this step and
    `schedule` belongs to the slowest replica."""

    loads: tuple[Load, ...]
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
    """The planner's data profile: random samples, and the largest of these and of many others. No
    sample of an evaluation batch is drawn for it."""
    samples = case.draw_loads(PROFILE_SAMPLES, SEEDS["profile"])
    population = [*samples, *case.draw_loads(POPULATION_SAMPLES, SEEDS["profile"])]
    tail_indices = {
        i
        for m in case.model().modules
        for i in heapq.nlargest(
            TAIL_SAMPLES, range(len(population)), key=lambda i: population[i].tokens(m)
        )
    }
    tail = tuple(population[i] for i in sorted(tail_indices))
    return DataProfile(case.name, len(population), tuple(samples), tail)


@cache
def evaluation_batches(case: Case) -> tuple[tuple[Load, ...], ...]:
    """Global batches that evaluate systems; they never tune one."""
    return _draw_batches(case, case.batches, SEEDS["evaluation"])


@cache
def tuning_batches(case: Case) -> tuple[tuple[Load, ...], ...]:
    """Global batches that tune systems with dynamic shapes."""
    n = TUNING_BATCHES if case.batches > 1 else 1
    return _draw_batches(case, n, SEEDS["tuning"])


def _draw_batches(case: Case, n: int, first_seed: int) -> tuple[tuple[Load, ...], ...]:
    return tuple(tuple(case.draw_loads(case.global_batch, first_seed + i)) for i in range(n))
