"""The graph of modules, and the plan that places them on devices."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from dflop_jax.records.check import require
from dflop_jax.records.data import Bucket, Shape
from dflop_jax.records.mesh import SubmeshPlan

Remat = Literal["none", "dots", "named", "layers", "segment"]
REMAT: tuple[str, ...] = get_args(Remat)
Zero = Literal[1, 2, 3]
ZERO: tuple[int, ...] = get_args(Zero)
Grouping = Literal["balanced", "arrival"]
Count = TypeVar("Count", int, np.ndarray)  # one, or of every cut


@dataclass(frozen=True)
class Edge:
    """An edge: outputs of the module `source` are placed into the module `target`.

    Attributes:
      name: the field under which the target reads them; edges of one name are added up.
      tap: which output of the source: "" its exit's features, else the name of one of its taps.
      leaves: layers of the source that have run where the tap leaves; -1: its exit.
      enters: layers of the target that have run where they are read; -1: its entry reads them.
      sources: outputs that one place is a weighted sum of; 1: a plain copy.
    """

    source: str
    target: str
    name: str
    tap: str = ""
    leaves: int = -1
    enters: int = -1
    sources: int = 1

    def __post_init__(self) -> None:
        require(
            self.source != self.target and bool(self.name) and self.sources >= 1,
            f"an edge joins two modules by a field and has sources >= 1, got {self}",
        )
        require(
            (self.leaves >= 0) == bool(self.tap) and min(self.leaves, self.enters) >= -1,
            f"an edge from a tap says after how many layers it leaves, got {self}",
        )


@dataclass(frozen=True)
class SegmentPlan:
    """Layers [start, stop) of a module on a submesh, with the module's ends where they belong.

    `remat` says what the backward task computes again, so that less is kept since forward: "none":
    only elementwise work; "dots": all but products with weights; "named": all but what the model
    names (attention's output); "layers": each layer, from its input; "segment": the whole segment,
    from its input. A segment that nobody reads has one task for forward and backward; there
    "segment" is "none", and the others say what is kept within the task. `remat_less` is a policy
    that keeps more, compiled beside it, for groups that memory has room for as a step goes (see
    `Group.remat_less`); None: there is none.

    `zero` says what is split over the data ranks instead of whole on each (ZeRO): 1: optimizer
    state, 2: gradients too, 3: parameters too. It is split within each block of `shard_devices`
    neighbouring devices, where such blocks are several whole data ranks and divide these (hybrid
    sharding), else, and for 0, over all.

    A microbatch goes through the stages of its submesh `rounds` times, each time through another
    chunk of each stage's layers.
    """

    name: str
    module: str
    start: int
    stop: int
    submesh: str
    first: bool
    last: bool
    remat: Remat = "none"
    zero: Zero = 1
    remat_less: Remat | None = None
    shard_devices: int = 0
    rounds: int = 1

    def __post_init__(self) -> None:
        require(self.shard_devices >= 0, f"segment {self.name!r}: shard_devices is negative")
        require(self.rounds >= 1, f"segment {self.name!r}: rounds={self.rounds} is not positive")
        require(self.stop > self.start >= 0, f"segment {self.name!r} holds no layer")
        require(self.remat in REMAT, f"segment {self.name!r}: remat={self.remat!r} not in {REMAT}")
        require(self.zero in ZERO, f"segment {self.name!r}: zero={self.zero!r} not in {ZERO}")
        weaker_policy = self.remat_less
        require(
            weaker_policy is None or weaker_policy in REMAT[: REMAT.index(self.remat)],
            f"segment {self.name!r}: remat_less={weaker_policy!r} is none of those that keep more "
            "than "
            f"{self.remat!r}",
        )

    @property
    def n_layers(self) -> int:
        return self.stop - self.start

    def ticks(self, stages: int, microbatches: Count) -> Count:
        """Return the ticks of a group's pipeline; a stage computes in all but `stages` - 1."""
        return self.rounds * microbatches + stages - 1

    def shard_ranks(self, data: Any, model: int) -> Any:
        """Return how many of `data` data ranks, of `model` devices each, share a parameter; an
        array for an array of degrees."""
        ranks, data = self.shard_devices // model, np.asarray(data)
        return np.where((ranks > 1) & (data % max(ranks, 1) == 0), ranks, data)[()]

    @property
    def with_less_remat(self) -> SegmentPlan:
        """The segment under its second recompute policy, `remat_less`."""
        assert self.remat_less is not None, f"{self.name} has one recompute policy"
        return dataclasses.replace(self, remat=self.remat_less, remat_less=None)

    def sends(self, edge: Edge) -> bool:
        """Whether the edge leaves from this segment; a tap leaves the segment of its layer."""
        if edge.source != self.module:
            return False
        return self.last if edge.leaves < 0 else self.runs_through(edge.leaves)

    def runs_through(self, layers: int) -> bool:
        """Whether the module's first `layers` layers end inside this segment."""
        return self.start < layers <= self.stop or (self.first and layers == 0)

    def reads(self, edge: Edge) -> bool:
        """Whether the edge enters this segment."""
        if edge.target != self.module:
            return False
        if edge.enters < 0:
            return self.first
        return self.start <= edge.enters < self.stop or (self.last and edge.enters == self.stop)


@dataclass(frozen=True)
class ExchangeCapacity:
    """The capacity of one round of the exchange between groups of `source` and `target` of these
    shapes: the share of a rank's features that one data rank can send to another."""

    source: str
    target: str
    source_shape: Shape
    target_shape: Shape
    share: float

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, f"a room is a share above 0 and at most 1, got {self}")


@dataclass(frozen=True)
class ResidualBytes:
    """Residual bytes per device: what a segment saves for the backward of a group of this shape,
    and how many more bytes under its second recompute policy."""

    segment: str
    shape: Shape
    n_bytes: float
    more_bytes: float


@dataclass(frozen=True)
class Predicted:
    """The planner's predictions for a plan: seconds of a mean step, the share of it in which each
    submesh computes, and the peak bytes of a device of each submesh. `chosen_by_s` is the step time
    by the profile's single layers, whose prices `priced_by` names; `makespan_s` is the step time by
    the plan's own programs once those are timed, before that `chosen_by_s`.

    `shapes_by` says whose buckets these are where the integer program of shapes was asked:
    "integer" its own, "search" those of local search. Their step is `shapes_gain` shorter than with
    the other's, and the program's optimum at most `shapes_gap` below its answer, both relative."""

    makespan_s: float = 0.0
    busy_fraction: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, float] = field(default_factory=dict)
    chosen_by_s: float = 0.0
    priced_by: str = ""
    shapes_by: str = ""
    shapes_gain: float = 0.0
    shapes_gap: float = 0.0


@dataclass(frozen=True)
class Layout:
    """Where a run's modules lie, and all else that its compiled programs depend on: equal layouts
    run the same programs.

    `segments` stand module by module, every module after those that it reads; `edges` are the
    model's. Before shapes are chosen there are no `buckets`. `group_size` microbatches are run by
    one program call. A microbatch's pieces go through some modules (`divided`) in at most `fan_in`
    groups of one small shape: those that read no other, whose groups together feed one, and the
    `divided_readers`, several of whose groups read one. The exits of `tied` modules read the
    parameters of their entries. `exchange_capacities` are
    what batches that the planner saw move between data ranks.
    """

    submeshes: tuple[SubmeshPlan, ...]
    segments: tuple[SegmentPlan, ...]
    buckets: tuple[Bucket, ...] = ()
    edges: tuple[Edge, ...] = ()
    group_size: int = 1
    fan_in: int = 1
    divided_readers: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    exchange_capacities: tuple[ExchangeCapacity, ...] = ()

    def __post_init__(self) -> None:
        names = [m.name for m in self.submeshes]
        require(len(set(names)) == len(names), f"submesh names repeat: {names}")
        require(len(self.segments) > 0, "a plan needs segments")
        require(self.group_size >= 1, f"group_size {self.group_size} must be at least 1")
        require(self.fan_in >= 1, f"fan_in {self.fan_in} must be at least 1")
        seg_names = [s.name for s in self.segments]
        require(len(set(seg_names)) == len(seg_names), f"segment names repeat: {seg_names}")
        for s in self.segments:
            require(s.submesh in names, f"segment {s.name!r} lies on unknown submesh {s.submesh!r}")
            self._check_stages(s)
        for module in self.modules:
            segments = self.segments_of(module)
            n = len(segments)
            joins = (
                [s.start for s in segments] == [0, *[s.stop for s in segments][:-1]]
                and [s.first for s in segments] == [i == 0 for i in range(n)]
                and [s.last for s in segments] == [i == n - 1 for i in range(n)]
            )
            require(joins, f"segments of {module!r} do not join end to end")
            for name in ("zero", "shard_devices"):
                values = {getattr(s, name) for s in segments}
                require(
                    len(values) == 1,
                    f"segments of {module!r} have {name}={sorted(values)}; give all of them one",
                )
        names = [module for module, _ in groupby(s.module for s in self.segments)]
        require(len(names) == len(set(names)), f"segments must stand module by module, got {names}")
        for e in self.edges:
            require(
                {e.source, e.target} <= {*names} and names.index(e.source) < names.index(e.target),
                f"edge {e.source} -> {e.target} must join modules of the plan, the source first; "
                f"it has {names}",
            )
        require(len(set(self.buckets)) == len(self.buckets), "buckets repeat; give each once")
        for b in self.buckets:
            unknown = {m for m, _ in b.shapes} - {*names}
            require(not unknown, f"bucket {b.name} has modules {unknown} that the plan lacks")

    def _check_stages(self, s: SegmentPlan) -> None:
        stage = self.submesh(s.submesh).stage
        require(
            s.n_layers % stage == 0,
            f"segment {s.name!r}: {s.n_layers} layers do not divide into {stage} stages; "
            "choose a stage count that divides them or split the module into segments",
        )
        require(
            s.rounds == 1 or (stage > 1 and s.n_layers % (stage * s.rounds) == 0),
            f"segment {s.name!r}: {s.rounds} rounds need several stages, and layers that stages x "
            f"rounds divide; it has stage={stage} and {s.n_layers} layers: choose rounds=1",
        )
        require(
            self.group_size % stage == 0,
            f"group_size {self.group_size} must be a multiple of stage={stage} of {s.submesh!r}",
        )
        inner_edges = [e for e in self.edges if (e.leaves >= 0 and s.sends(e)) or (
            e.enters >= 0 and s.reads(e))]  # fmt: skip
        require(
            stage == 1 or not inner_edges,
            f"segment {s.name!r} has {stage} stages and an edge between its layers; use segments "
            "in place of stages for this module",
        )

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """Module names in topological order."""
        return tuple(dict.fromkeys(s.module for s in self.segments))

    @cached_property
    def n_devices(self) -> int:
        return max(m.devices.stop for m in self.submeshes)

    def submesh(self, name: str) -> SubmeshPlan:
        return next(m for m in self.submeshes if m.name == name)

    def segment(self, name: str) -> SegmentPlan:
        return next(s for s in self.segments if s.name == name)

    def segments_of(self, module: str) -> tuple[SegmentPlan, ...]:
        return tuple(s for s in self.segments if s.module == module)

    def data_ranks(self, module: str) -> int:
        """Data-parallel degree of a module; all its segments share it."""
        ranks = {self.submesh(s.submesh).data for s in self.segments_of(module)}
        require(len(ranks) == 1, f"segments of {module!r} differ in data parallelism: {ranks}")
        return ranks.pop()

    def exchange_capacity(
        self, edge: Edge, source_shape: Shape, target_shape: Shape
    ) -> float | None:
        """Return the share of a rank's features that one round sends to another; None: unknown."""
        key = (edge.source, edge.target, source_shape, target_shape)
        capacities = (
            r
            for r in self.exchange_capacities
            if (r.source, r.target, r.source_shape, r.target_shape) == key
        )
        return next((r.share for r in capacities), None)

    def devices(self, module: str) -> tuple[int, ...]:
        """Return the first device of each of a module's data ranks, at the module's exit."""
        mesh = self.submesh(self.segments_of(module)[-1].submesh)
        return tuple(mesh.first + rank * mesh.stride("data") for rank in range(mesh.data))

    def shapes(self, module: str) -> tuple[Shape, ...]:
        """Return the module's compiled shapes, in the order of the buckets."""
        shapes = (b.shape(module) for b in self.buckets)
        return tuple(dict.fromkeys(s for s in shapes if s is not None))

    @cached_property
    def divided(self) -> tuple[str, ...]:
        """Modules of which several groups may go with one of each module that they feed or read,
        where `fan_in` allows it."""
        if self.fan_in == 1:
            return ()
        readers = set(self.divided_readers)
        return tuple(
            m for m in self.modules
            if m in readers
            or (self.targets(m) and not self.sources(m) and readers.isdisjoint(self.targets(m)))
        )  # fmt: skip

    def sources(self, module: str) -> tuple[str, ...]:
        """Modules whose outputs it reads."""
        return tuple(dict.fromkeys(e.source for e in self.edges if e.target == module))

    def targets(self, module: str) -> tuple[str, ...]:
        """Modules that read its outputs."""
        return tuple(dict.fromkeys(e.target for e in self.edges if e.source == module))


@dataclass(frozen=True)
class Scheduling:
    """How the batches of a run are divided into groups and ordered.

    `grouping` says how samples meet microbatches: "balanced" (min-max, packed) or "arrival" (in
    order, one sample a row). `lookahead` more groups than in 1F1B may be in flight, so that unlike
    ones do not leave a submesh waiting. `work_budget` bounds the solver of one batch in units of
    work (pairs of rows priced), so that the step hides it; 0: the scheduler's default. Every `node`
    devices, counted from the first, share a node; 0: all do. `residuals` says what groups hold of
    the segments with two recompute policies, and `free_bytes`, by submesh, what of a device's
    memory is left when every segment keeps as many groups as it ever may under the first.
    """

    grouping: Grouping = "balanced"
    order: Literal["1f1b", "gpipe"] = "1f1b"
    lookahead: int = 0
    work_budget: int = 0
    node: int = 0
    residuals: tuple[ResidualBytes, ...] = ()
    free_bytes: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.lookahead >= 0, f"lookahead {self.lookahead} must not be negative")
        require(self.node >= 0, f"node {self.node} must not be negative")
        require(self.order in ("1f1b", "gpipe"), f"order {self.order!r} is not 1f1b or gpipe")
        require(
            self.grouping in get_args(Grouping),
            f"grouping {self.grouping!r} is not balanced or arrival",
        )


@dataclass(frozen=True)
class Plan:
    """The static plan of a run: its programs, how batches are scheduled on them, and
    predictions."""

    policy: str
    layout: Layout
    scheduling: Scheduling = Scheduling()
    predicted: Predicted = Predicted()

    def with_layout(self, **changes: Any) -> Plan:
        """The plan with other fields of its layout."""
        return dataclasses.replace(self, layout=dataclasses.replace(self.layout, **changes))

    def with_scheduling(self, **changes: Any) -> Plan:
        """The plan with other fields of its scheduling."""
        scheduling = dataclasses.replace(self.scheduling, **changes)
        return dataclasses.replace(self, scheduling=scheduling)


def with_remat(plan: Plan, remat: Remat) -> Plan:
    """The plan with every segment's `remat` replaced, and no second policy."""
    segments = plan.layout.segments
    segments = tuple(dataclasses.replace(s, remat=remat, remat_less=None) for s in segments)
    return plan.with_layout(segments=segments).with_scheduling(residuals=(), free_bytes={})
