"""Prices: the seconds of programs, transfers and the end of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflop_jax.records.check import require
from dflop_jax.records.data import Shape
from dflop_jax.records.features import content_seconds
from dflop_jax.records.plan import Layout
from dflop_jax.records.schedule import NO_GROUP, Direction, Group, Schedule, Task


@dataclass(frozen=True)
class ProgramId:
    """A compiled program: a segment at a shape in a direction, under its own recompute policy or
    under its second one."""

    segment: str
    shape: Shape
    direction: Direction
    remat_less: bool = False

    @staticmethod
    def for_task(task: Task, group: Group) -> ProgramId:
        """Return the program that a task of a group runs."""
        has_less_remat = task.segment in group.remat_less
        return ProgramId(task.segment, group.shape, task.direction, has_less_remat)


@dataclass(frozen=True)
class Price:
    """Seconds of a program call: `static_s` for its shape, padding included, and `content_s` for
    every unit of each feature of `Group.content`; () where all goes by the shape."""

    static_s: float
    content_s: tuple[float, ...] = ()

    def seconds(self, content: Sequence[float]) -> float:
        return self.static_s + content_seconds(self.content_s, content)

    def scaled(self, factor: float, min_s: float = 0.0) -> Price:
        """Return the price times `factor`, with `static_s` of at least `min_s`."""
        content = tuple(factor * s for s in self.content_s)
        return Price(max(self.static_s * factor, min_s), content)


def add_host_work(seconds: Any, host_s: float, *, shares_cores: bool) -> Any:
    """Return the seconds of tasks (a number or an array) with the work of the dispatching thread,
    `host_s` for each task.

    If the devices are cores of the host, the work adds to the devices' time. Otherwise it overlaps
    with the devices, but no task takes less time than its dispatch.
    """
    return seconds + host_s if shares_cores else np.maximum(seconds, host_s)


@dataclass(frozen=True)
class SendId:
    """A transfer between segments on different devices: activations to a group of this shape of the
    target (forward), or their gradient on the way back (backward)."""

    source: str
    target: str
    shape: Shape
    direction: Direction


@dataclass(frozen=True)
class Prices:
    """Seconds of everything in a step when it runs alone. Scheduler, planner, simulator and
    correction use the same prices.

    Attributes:
      programs: of groups' tasks.
      step_end: of the tasks that run once a step (reduce, update); absent ones take no time.
      sends: of what crosses from one submesh to another; absent ones take no time.
      concurrency: devices that really compute at once.
      host_s: work of a process's dispatching thread for each task on its devices, what it does for
        tasks of other processes included. Prices of programs hold it (see `add_host_work`).
      shares_cores: whether the devices are cores of the host, so that the work is a part of them.
    """

    programs: Mapping[ProgramId, Price]
    step_end: Mapping[Task, float] = field(default_factory=dict)
    sends: Mapping[SendId, float] = field(default_factory=dict)
    concurrency: float = float("inf")
    host_s: float = 0.0
    shares_cores: bool = False

    def __post_init__(self) -> None:
        all_seconds = [p.static_s for p in self.programs.values()]
        all_seconds += [s for p in self.programs.values() for s in p.content_s]
        all_seconds += [*self.step_end.values(), *self.sends.values(), self.host_s]
        invalid = [s for s in all_seconds if not 0 <= s < float("inf")]
        require(not invalid, f"prices must be finite and not negative, got {invalid[:3]}")
        require(self.concurrency > 0, "concurrency must be above 0")

    def task_s(self, layout: Layout, schedule: Schedule, task: Task) -> float:
        """Return the seconds of a task that runs alone; 0 if it has no price."""
        if task.group == NO_GROUP:
            return self.step_end.get(task, 0.0)
        group = schedule.groups[task.group]
        price = self.programs.get(ProgramId.for_task(task, group))
        return price.seconds(group.content) if price else 0.0


@dataclass(frozen=True)
class PriceList:
    """`Prices` as pairs, since JSON keys are strings; `concurrency` None means unlimited."""

    programs: tuple[tuple[ProgramId, Price], ...]
    step_end: tuple[tuple[Task, float], ...]
    sends: tuple[tuple[SendId, float], ...]
    concurrency: float | None
    host_s: float = 0.0
    shares_cores: bool = False

    @classmethod
    def from_prices(cls, prices: Prices) -> PriceList:
        pairs = {n: tuple(v.items()) for n, v in vars(prices).items() if isinstance(v, Mapping)}
        concurrency = None if prices.concurrency == math.inf else prices.concurrency
        return cls(**vars(prices) | pairs | {"concurrency": concurrency})

    @property
    def prices(self) -> Prices:
        tables = {n: dict(v) for n, v in vars(self).items() if isinstance(v, tuple)}
        concurrency = math.inf if self.concurrency is None else self.concurrency
        return Prices(**vars(self) | tables | {"concurrency": concurrency})
