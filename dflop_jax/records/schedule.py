"""One global batch as groups of every module, and traces of its execution."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from dflop_jax.records.check import require
from dflop_jax.records.data import Shape
from dflop_jax.records.packed_pieces import EMPTY_PACKED_PIECES, PackedPieces

Direction = Literal["forward", "backward", "reduce", "update"]
FORWARD: Direction = "forward"
BACKWARD: Direction = "backward"
REDUCE: Direction = "reduce"
UPDATE: Direction = "update"
Status = Literal["optimal", "feasible", "greedy"]
ScheduleMaker = Literal[
    "arrival", "greedy", "local", "integer"
]  # what found the groups of a schedule
NO_GROUP = -1  # the group of a task that runs once a step


@dataclass(frozen=True)
class Group:
    """Microbatches of one module and one shape, run by one program call.

    `feeds` are the places in the schedule of the groups that read its output: of a module that
    reads the module's one, or several that read no other group of it. `content` has of each feature
    of the module's content the sum over the pieces of the data rank with most, which the others
    wait for. `remat_less` names the segments that run it under their second recompute policy.
    Groups that are only simulated need not say which `pieces` they hold.
    """

    module: str
    shape: Shape
    feeds: tuple[int, ...] = ()
    content: tuple[int, ...] = ()
    pieces: PackedPieces = EMPTY_PACKED_PIECES
    microbatches: int = 1
    remat_less: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.microbatches > 0, f"a group of {self.module!r} holds no microbatch")
        for column, limit, unit in (
            (self.pieces.microbatch, self.microbatches, "microbatch"),
            (self.pieces.row, self.shape.rows, "row"),
        ):
            require(
                column.min(initial=0) >= 0 and column.max(initial=0) < limit,
                f"a piece of {self.module!r} lies in no {unit} of its group, which has {limit}",
            )


class Task(NamedTuple):
    """One program call: a segment, a group's place in the schedule (`NO_GROUP`: once a step), a
    direction."""

    segment: str
    group: int
    direction: Direction


@dataclass(frozen=True)
class Schedule:
    """One global batch as groups of every module, their edges, and optionally the order of tasks.

    Without an `order` the runtime makes one by list scheduling. Times are seconds; `makespan_s` is
    the simulator's, and no schedule of this batch under the same plan can be faster than
    `lower_bound_s`, a part of which an integer program may have proved (`integer_bound_s`; 0: it
    was not asked). `made_by` is what found the groups, and `work` counts what the solvers did, in
    the unit of `Plan.work_budget`.
    """

    step: int
    groups: tuple[Group, ...]
    order: tuple[Task, ...] = ()
    makespan_s: float = 0.0
    lower_bound_s: float = 0.0
    status: Status = "greedy"
    work: int = 0
    elapsed_s: float = 0.0
    made_by: ScheduleMaker = "greedy"
    integer_bound_s: float = 0.0

    def __post_init__(self) -> None:
        for module in {g.module for g in self.groups}:
            piece_numbers = np.concatenate(
                [g.pieces.piece_id for g in self.groups if g.module == module]
            )
            is_unique = np.bincount(piece_numbers).max(initial=0) <= 1
            require(is_unique, f"a piece of {module!r} is scheduled twice")
        feeders = Counter((f, g.module) for g in self.groups for f in g.feeds)
        for i, g in enumerate(self.groups):
            target_modules = [self.groups[f].module for f in g.feeds if 0 <= f < len(self.groups)]
            require(
                len(target_modules) == len(g.feeds) == len(set(g.feeds))
                and g.module not in target_modules,
                f"group {i} feeds {g.feeds}; it may feed groups of other modules, each once",
            )
            shared_targets = [
                f for f, m in zip(g.feeds, target_modules) if target_modules.count(m) > 1
            ]
            require(
                all(feeders[f, g.module] == 1 for f in shared_targets),
                f"group {i} feeds {g.feeds}, of which some read other groups of {g.module!r}, too",
            )

    @property
    def gap(self) -> float:
        """The step time over its proved bound, less 1; nan if no bound is known."""
        return self.makespan_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else math.nan

    def fed_by(self, group: int, module: str) -> tuple[int, ...]:
        """Return the groups of `module` that feed a group."""
        return tuple(
            i for i, g in enumerate(self.groups) if g.module == module and group in g.feeds
        )


# ---- what happened in a step, or would ----

# Between submeshes: what a segment sends on, and the gradients that come back to it.
SEND, RETURN = "send", "return"


@dataclass(frozen=True)
class Event:
    """A task that ran or was simulated on a submesh; times are seconds from the step's start."""

    submesh: str
    segment: str
    group: int
    direction: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Trace:
    """The events of one step, measured or simulated."""

    step: int
    source: str
    events: tuple[Event, ...]

    @property
    def makespan_s(self) -> float:
        return max((e.end_s for e in self.events), default=0.0)

    def busy_fraction(self) -> dict[str, float]:
        """Return the fraction of the makespan in which each submesh computes."""
        total = self.makespan_s
        busy: dict[str, float] = {}
        for e in self.events:
            busy[e.submesh] = busy.get(e.submesh, 0.0) + (e.end_s - e.start_s)
        return {name: (b / total if total > 0 else 0.0) for name, b in busy.items()}
