"""Records of a schedule (a global batch as groups of every module) and of execution traces."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from dflop_jax.records.data import Shape, require
from dflop_jax.records.plan import Layout

Direction = Literal["forward", "backward", "reduce", "update"]
FORWARD: Direction = "forward"
BACKWARD: Direction = "backward"
REDUCE: Direction = "reduce"
UPDATE: Direction = "update"
Status = Literal["optimal", "feasible", "greedy"]
ScheduleMaker = Literal["arrival", "greedy", "local", "integer"]  # method that chose the groups
# Ways to run a batch without data-aware scheduling, which a run is compared with.
ARRIVAL_ORDER, LONGEST_FIRST, FSDP = "arrival order", "longest first", "FSDP"
NO_GROUP = -1  # the group of a task that runs once per step


@dataclass(frozen=True, eq=False)
class PackedPieces:
    """Assignment of n pieces of a module to rows, which the packer uses: columns `piece_id` (index
    among the module's pieces of the global batch), `microbatch`, `rank`, `row`, int64 [4, n].
    Pieces of one row are packed in the order of the entries."""

    columns: np.ndarray

    def __post_init__(self) -> None:
        shape = self.columns.shape
        require(len(shape) == 2 and shape[0] == 4, f"packed pieces need shape [4, n], got {shape}")

    @classmethod
    def from_columns(
        cls, piece_id: np.ndarray, microbatch: np.ndarray, rank: np.ndarray, row: np.ndarray
    ) -> PackedPieces:
        return cls(np.stack((piece_id, microbatch, rank, row)))

    @property
    def piece_id(self) -> np.ndarray:
        return self.columns[0]

    @property
    def microbatch(self) -> np.ndarray:
        return self.columns[1]

    @property
    def rank(self) -> np.ndarray:
        return self.columns[2]

    @property
    def row(self) -> np.ndarray:
        return self.columns[3]

    def __len__(self) -> int:
        return self.columns.shape[1]

    def __eq__(self, compared: object) -> bool:
        return isinstance(compared, PackedPieces) and np.array_equal(self.columns, compared.columns)

    def __hash__(self) -> int:
        return hash(self.columns.tobytes())

    @cached_property
    def _sorted_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """(entries sorted by row, for each of them the sorted index where its row begins), [n]."""
        order = np.lexsort((self.row, self.rank, self.microbatch))
        row = self.columns[1:, order]
        is_first = np.append(True, (row[:, 1:] != row[:, :-1]).any(axis=0))[: len(order)]
        return order, np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))

    @cached_property
    def segment(self) -> np.ndarray:
        """Segment ids, int64 [n]: pieces are numbered from 1 in every row."""
        return self.row_offsets(np.ones(len(self), np.int64)) + 1

    def row_offsets(self, amount: np.ndarray) -> np.ndarray:
        """Return for each piece the sum of `amount` [n] over the pieces before it in its row."""
        order, begins = self._sorted_rows
        total = np.cumsum(amount[order]) - amount[order]
        result = np.empty_like(total)
        result[order] = total - total[begins]
        return result

    def select(self, entries: np.ndarray) -> PackedPieces:
        """Return the entries that a mask or an index array selects."""
        return PackedPieces(self.columns[:, entries])

    def reassigned(self, rank: np.ndarray, row: np.ndarray) -> PackedPieces:
        """Return the same pieces on these ranks, in these rows."""
        columns = self.columns.copy()
        columns[2:] = rank, row
        return PackedPieces(columns)

    def sorted_by_row(self) -> PackedPieces:
        """Return the same pieces sorted by microbatch, rank, row and piece id."""
        return self.select(np.lexsort((self.piece_id, self.row, self.rank, self.microbatch)))


EMPTY_PACKED_PIECES = PackedPieces(np.zeros((4, 0), np.int64))


@dataclass(frozen=True)
class Group:
    """Microbatches of one module and one shape, run by one program call."""

    module: str
    shape: Shape
    # Indices in the schedule of the groups that read the output: one per reading module, or several
    # that read no other group of this module.
    feeds: tuple[int, ...] = ()
    # Amount of each content feature, the maximum over data ranks, since ranks wait for each other.
    content: tuple[int, ...] = ()
    pieces: PackedPieces = EMPTY_PACKED_PIECES  # not needed for simulation
    microbatches: int = 1
    remat_less: tuple[str, ...] = ()  # segments that run the group under their second policy

    def __post_init__(self) -> None:
        require(self.microbatches > 0, f"a group of {self.module!r} has no microbatch")
        for column, limit, unit in (
            (self.pieces.microbatch, self.microbatches, "microbatch"),
            (self.pieces.row, self.shape.rows, "row"),
        ):
            require(
                column.min(initial=0) >= 0 and column.max(initial=0) < limit,
                f"a piece of {self.module!r} has a {unit} outside its group, which has {limit}",
            )


class Task(NamedTuple):
    """A task of a step: one program call of a segment."""

    segment: str
    group: int  # index in the schedule; `NO_GROUP`: once per step
    direction: Direction


@dataclass(frozen=True)
class Schedule:
    """A global batch as groups of every module, and the order of their tasks."""

    step: int
    groups: tuple[Group, ...]
    order: tuple[Task, ...] = ()  # (): the runtime orders tasks by list scheduling
    makespan_s: float = 0.0  # simulated
    lower_bound_s: float = 0.0  # of any schedule of this batch under the same plan
    status: Status = "greedy"
    work: int = 0  # solvers' work units, as in `Scheduling.work_budget`
    elapsed_s: float = 0.0
    made_by: ScheduleMaker = "greedy"
    integer_bound_s: float = 0.0  # proved by the integer program; 0: it did not run

    def __post_init__(self) -> None:
        for module in {g.module for g in self.groups}:
            numbers = [g.pieces.piece_id for g in self.groups if g.module == module]
            is_unique = np.bincount(np.concatenate(numbers)).max(initial=0) <= 1
            require(is_unique, f"a piece of {module!r} is scheduled twice")
        feeders = Counter((f, g.module) for g in self.groups for f in g.feeds)
        for i, g in enumerate(self.groups):
            targets = [self.groups[f].module for f in g.feeds if 0 <= f < len(self.groups)]
            is_valid = len(targets) == len(g.feeds) == len(set(g.feeds)) and g.module not in targets
            problem = "feeds must be distinct groups of other modules"
            require(is_valid, f"group {i} feeds {g.feeds}; {problem}")
            shared = [f for f, m in zip(g.feeds, targets) if targets.count(m) > 1]
            problem = f"some of which also read other groups of {g.module!r}"
            alone = all(feeders[f, g.module] == 1 for f in shared)
            require(alone, f"group {i} feeds {g.feeds}, {problem}")

    @property
    def gap(self) -> float:
        """Relative gap of the step time to its lower bound; nan if no bound is known."""
        return self.makespan_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else math.nan

    def feeders(self, group: int, module: str) -> tuple[int, ...]:
        """Return the indices of the groups of `module` that feed `group`."""
        feeders = (i for i, g in enumerate(self.groups) if g.module == module and group in g.feeds)
        return tuple(feeders)

    def count_tokens(self, layout: Layout) -> dict[str, int]:
        """Return the tokens that all data ranks of each module compute, with padding."""
        n_tokens = dict.fromkeys(layout.modules, 0)
        for g in self.groups:
            n_tokens[g.module] += g.microbatches * layout.data_ranks(g.module) * g.shape.size
        return n_tokens


# ---- traces ----

# Sends between submeshes: activations from a segment, and gradients back to it.
SEND, RETURN = "send", "return"


@dataclass(frozen=True)
class Event:
    """A task or send, measured or simulated; times are seconds from the start of the step."""

    submesh: str
    segment: str
    group: int
    direction: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Trace:
    """Events of one step, measured or simulated."""

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
