"""Prices: seconds of programs, transfers and step-end tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflop_jax.records.data import Shape, content_seconds, require
from dflop_jax.records.schedule import Direction, Group, Task


@dataclass(frozen=True)
class ProgramId:
    """Identifier of a segment's compiled program."""

    segment: str
    shape: Shape
    direction: Direction
    remat_less: bool = False  # under the segment's second recompute policy

    @staticmethod
    def for_task(task: Task, group: Group) -> ProgramId:
        """Return the program that a group's task runs."""
        has_less_remat = task.segment in group.remat_less
        return ProgramId(task.segment, group.shape, task.direction, has_less_remat)


@dataclass(frozen=True)
class Price:
    """Time of a program call."""

    static_s: float  # for the static shape, padding included
    content_s: tuple[float, ...] = ()  # per unit of each feature of `Group.content`

    def seconds(self, content: Sequence[float]) -> float:
        return self.static_s + content_seconds(self.content_s, content)

    def scaled(self, factor: float, min_s: float = 0.0) -> Price:
        """Return the price times `factor`, with `static_s` of at least `min_s`."""
        content = tuple(factor * s for s in self.content_s)
        return Price(max(self.static_s * factor, min_s), content)


def add_host_work(seconds: Any, host_s: float, *, shares_cores: bool) -> Any:
    """Return task seconds (number or array) with the dispatching thread's `host_s` per task: added
    if devices are cores of the host; otherwise it overlaps and is the minimum of a task's time."""
    return seconds + host_s if shares_cores else np.maximum(seconds, host_s)


@dataclass(frozen=True)
class SendId:
    """Identifier of a send between submeshes: activations, or their gradient (backward)."""

    source: str
    target: str
    shape: Shape
    direction: Direction


@dataclass(frozen=True)
class Prices:
    """Seconds of each task and send when it runs alone, for scheduler, planner, simulator and
    correction. Absent step-end tasks and sends take no time."""

    programs: Mapping[ProgramId, Price]
    step_end: Mapping[Task, float] = field(default_factory=dict)  # reduce, update: once per step
    sends: Mapping[SendId, float] = field(default_factory=dict)  # from one submesh to another
    concurrency: float = math.inf  # number of devices that can compute at the same time
    # Seconds of a process's dispatching thread per task on its devices, including its work for
    # tasks of other processes. Program prices include it (see `add_host_work`).
    host_s: float = 0.0
    shares_cores: bool = False  # whether the devices are cores of the host

    def __post_init__(self) -> None:
        all_seconds = [s for p in self.programs.values() for s in (p.static_s, *p.content_s)]
        all_seconds += [*self.step_end.values(), *self.sends.values(), self.host_s]
        invalid = [s for s in all_seconds if not 0 <= s < math.inf]
        require(not invalid, f"prices must be finite and not negative, got {invalid[:3]}")
        require(self.concurrency > 0, "concurrency must be above 0")


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
