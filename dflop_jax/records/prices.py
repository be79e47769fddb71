"""What everything in a step takes."""

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
        """What a task of a group runs."""
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
        """The price with so many times the seconds, `static_s` at least `least_s`."""
        content = tuple(factor * s for s in self.content_s)
        return Price(max(self.static_s * factor, min_s), content)


def add_host_work(seconds: Any, host_s: float, *, shares_cores: bool) -> Any:
    """Seconds of tasks (a number or an array) from those of their devices and of the thread that
    dispatches them, `host_s` each.

    Where the devices are cores of the host, its work is done in the devices' place. Elsewhere it is
    hidden behind what devices do, except that no task is done before the thread comes to the next.
    """
    return seconds + host_s if shares_cores else np.maximum(seconds, host_s)


@dataclass(frozen=True)
class SendId:
    """What one segment sends another on other devices: activations to a group of this shape of the
    target's (forward), or their gradient that comes back (backward)."""

    source: str
    target: str
    shape: Shape
    direction: Direction


@dataclass(frozen=True)
class Prices:
    """What everything in a step takes, in seconds when run alone: the one price that scheduler,
    planner, simulator and correction ask.

    Attributes:
      programs: of groups' tasks.
      step_end: of the tasks that run once a step (reduce, update); absent ones take no time.
      sends: of what crosses from one submesh to another; absent ones take no time.
      concurrency: devices that really compute at once.
      host_s: work of a process's dispatching thread for each task on its devices, what it does for
        tasks of other processes included. Prices of programs hold it (see `with_host_work`).
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
        """Seconds of a task run alone; 0 without a price."""
        if task.group == NO_GROUP:
            return self.step_end.get(task, 0.0)
        group = schedule.groups[task.group]
        price = self.programs.get(ProgramId.for_task(task, group))
        return price.seconds(group.content) if price else 0.0


@dataclass(frozen=True)
class PriceList:
    """`Prices` as pairs, for JSON has no keys but strings; no concurrency stands for any."""

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
