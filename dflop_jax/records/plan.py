"""The graph of modules, and the plan that places them on devices."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from dflop_jax.records.data import Bucket, Shape, require
from dflop_jax.records.mesh import SubmeshPlan

Remat = Literal["none", "dots", "named", "layers", "segment"]
REMAT: tuple[str, ...] = get_args(Remat)
Zero = Literal[1, 2, 3]
ZERO: tuple[int, ...] = get_args(Zero)
Grouping = Literal["balanced", "arrival"]
Order = Literal["1f1b", "gpipe"]
Count = TypeVar("Count", int, np.ndarray)  # one, or of every cut


@dataclass(frozen=True)
class Edge:
    """An edge: outputs of the module `source` are placed into the module `target`."""

    source: str
    target: str
    name: str  # the field under which the target reads them; edges of one name are added up
    tap: str = ""  # of the source whose output it is; "": its exit's features
    leaves: int = -1  # layers of the source that have run where the tap leaves; -1: its exit
    enters: int = -1  # layers of the target that have run where they are read; -1: its entry
    sources: int = 1  # outputs that one place is a weighted sum of; 1: a plain copy

    def __post_init__(self) -> None:
        is_named = self.source != self.target and bool(self.name) and self.sources >= 1
        require(is_named, f"an edge joins two modules by a field, sources >= 1, got {self}")
        has_layers = (self.leaves >= 0) == bool(self.tap) and min(self.leaves, self.enters) >= -1
        require(has_layers, f"an edge from a tap says after how many layers it leaves, got {self}")


@dataclass(frozen=True)
class SegmentPlan:
    """Layers [start, stop) of a module on a submesh, with the module's ends where they belong.

    `remat` says what the backward task computes again, so that less is kept since forward: "none":
    only elementwise work; "dots": all but products with weights; "named": all but what the model
    names (attention's output); "layers": each layer, from its input; "segment": the whole segment,
    from its input. A segment that nobody reads has one task for forward and backward; there
    "segment" is "none", and the others say what is kept within the task.
    """

    name: str
    module: str
    start: int
    stop: int
    submesh: str
    first: bool
    last: bool
    remat: Remat = "none"
    # What is split over the data ranks instead of whole on each (ZeRO): 1: optimizer state, 2:
    # gradients too, 3: parameters too.
    zero: Zero = 1
    # A policy that keeps more, compiled beside `remat`, for groups that memory has room for as a
    # step goes (see `Group.remat_less`).
    remat_less: Remat | None = None
    # Neighbouring devices within which that is split, where such blocks are several whole data
    # ranks and divide these (hybrid sharding), else, and for 0, it is split over all.
    shard_devices: int = 0
    # Times that a microbatch goes through the stages of its submesh, each time through another
    # chunk of each stage's layers.
    rounds: int = 1

    def __post_init__(self) -> None:
        name = f"segment {self.name!r}"
        require(self.shard_devices >= 0, f"{name}: shard_devices is negative")
        require(self.rounds >= 1, f"{name}: rounds={self.rounds} is not positive")
        require(self.stop > self.start >= 0, f"{name} holds no layer")
        require(self.remat in REMAT, f"{name}: remat={self.remat!r} not in {REMAT}")
        require(self.zero in ZERO, f"{name}: zero={self.zero!r} not in {ZERO}")
        keeps_more = self.remat_less in (None, *REMAT[: REMAT.index(self.remat)])
        require(keeps_more, f"{name}: remat_less={self.remat_less!r} keeps no more than remat")

    @property
    def n_layers(self) -> int:
        return self.stop - self.start

    def ticks(self, stages: int, microbatches: Count) -> Count:
        """Ticks of a group's pipeline; a stage computes in all but `stages` - 1."""
        return self.rounds * microbatches + stages - 1

    def shard_ranks(self, data: Any, model: int) -> Any:
        """How many of `data` ranks, of `model` devices each, share a parameter (or arrays)."""
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
    """The capacity of one round of the exchange between groups of two modules of these shapes."""

    source: str
    target: str
    source_shape: Shape
    target_shape: Shape
    share: float  # of a rank's features that one data rank can send to another

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, f"a room is a share above 0 and at most 1, got {self}")


@dataclass(frozen=True)
class ResidualBytes:
    """Bytes per device that a segment saves for the backward of a group of this shape."""

    segment: str
    shape: Shape
    n_bytes: float
    more_bytes: float  # under its second recompute policy


@dataclass(frozen=True)
class Predicted:
    """The planner's predictions for a mean step of a plan."""

    makespan_s: float = 0.0  # by the plan's own programs once those are timed, else `chosen_by_s`
    busy_fraction: dict[str, float] = field(default_factory=dict)  # in which a submesh computes
    peak_bytes: dict[str, float] = field(default_factory=dict)  # of a device of each submesh
    chosen_by_s: float = 0.0  # step time by the profile's single layers
    priced_by: str = ""  # whose prices are of this


@dataclass(frozen=True)
class Layout:
    """Where modules lie, and all else that compiled programs depend on: equal if these are."""

    submeshes: tuple[SubmeshPlan, ...]
    segments: tuple[SegmentPlan, ...]  # module by module, every module after those that it reads
    buckets: tuple[Bucket, ...] = ()  # none before shapes are chosen
    edges: tuple[Edge, ...] = ()  # of the model
    group_size: int = 1  # microbatches that one program call runs
    # A microbatch's pieces go through some modules (`divided`) in at most `fan_in` groups of one
    # small shape: those that read no other, whose groups together feed one, and the
    # `divided_readers`, several of whose groups read one.
    fan_in: int = 1
    divided_readers: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()  # modules whose exits read the parameters of their entries
    # What batches that the planner saw move between data ranks.
    exchange_capacities: tuple[ExchangeCapacity, ...] = ()

    def __post_init__(self) -> None:
        require(len(self.segments) > 0, "a plan needs segments")
        for size in ("group_size", "fan_in"):
            n = getattr(self, size)
            require(n >= 1, f"{size} {n} must be at least 1")
        for kind, blocks in (("submesh", self.submeshes), ("segment", self.segments)):
            names = [x.name for x in blocks]
            require(len(set(names)) == len(names), f"{kind} names repeat: {names}")
        meshes = {m.name for m in self.submeshes}
        for s in self.segments:
            has_submesh = s.submesh in meshes
            require(has_submesh, f"segment {s.name!r} lies on unknown submesh {s.submesh!r}")
            self._check_stages(s)
        for module in self.modules:
            segments = self.segments_of(module)
            starts = [0, *(s.stop for s in segments[:-1])]
            ends = [(i == 0, i == len(segments) - 1) for i in range(len(segments))]
            joins = [(s.start, (s.first, s.last)) for s in segments] == [*zip(starts, ends)]
            require(joins, f"segments of {module!r} do not join end to end")
            for name in ("zero", "shard_devices"):
                values = {getattr(s, name) for s in segments}
                differ = f"segments of {module!r} have {name}={sorted(values)}; give all one"
                require(len(values) == 1, differ)
        names = [module for module, _ in groupby(s.module for s in self.segments)]
        require(len(names) == len(set(names)), f"segments must stand module by module, got {names}")
        for e in self.edges:
            indices = [names.index(m) for m in (e.source, e.target) if m in names]
            require(
                len(indices) == 2 and indices[0] < indices[1],
                f"edge {e.source} -> {e.target} must join modules of the plan, the source first; "
                f"it has {names}",
            )
        require(len(set(self.buckets)) == len(self.buckets), "buckets repeat; give each once")
        for b in self.buckets:
            unknown = {m for m, _ in b.shapes} - {*names}
            require(not unknown, f"bucket {b.name} has modules {unknown} that the plan lacks")

    def _check_stages(self, s: SegmentPlan) -> None:
        stage = self.submesh(s.submesh).stage
        name, n = f"segment {s.name!r}", s.n_layers
        require(n % stage == 0, f"{name}: {n} layers do not divide into {stage} stages")
        require(
            s.rounds == 1 or (stage > 1 and n % (stage * s.rounds) == 0),
            f"{name}: {s.rounds} rounds need several stages, and layers that stages x rounds "
            f"divide; it has stage={stage} and {n} layers: choose rounds=1",
        )
        is_multiple = self.group_size % stage == 0
        require(is_multiple, f"group_size {self.group_size} must be a multiple of stage={stage}")
        sends = any(e.leaves >= 0 and s.sends(e) for e in self.edges)
        reads = any(e.enters >= 0 and s.reads(e) for e in self.edges)
        require(
            stage == 1 or not (sends or reads),
            f"{name} has {stage} stages and an edge between its layers; use segments instead",
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
        """The share of a rank's features that one round sends to another; None: unknown."""
        key = edge.source, edge.target, source_shape, target_shape
        for r in self.exchange_capacities:
            if (r.source, r.target, r.source_shape, r.target_shape) == key:
                return r.share
        return None

    def devices(self, module: str) -> tuple[int, ...]:
        """The first device of each of a module's data ranks, at the module's exit."""
        mesh = self.submesh(self.segments_of(module)[-1].submesh)
        return tuple(mesh.first + rank * mesh.stride("data") for rank in range(mesh.data))

    def shapes(self, module: str) -> tuple[Shape, ...]:
        """The module's compiled shapes, in the order of the buckets."""
        shapes = (b.shape(module) for b in self.buckets)
        return tuple(dict.fromkeys(s for s in shapes if s is not None))

    @cached_property
    def divided(self) -> tuple[str, ...]:
        """Modules of which several groups may go with one of the others (see `fan_in`)."""
        if self.fan_in == 1:
            return ()
        readers = set(self.divided_readers)

        def only_feeds(m: str) -> bool:
            targets = self.targets(m)
            return bool(targets) and not self.sources(m) and readers.isdisjoint(targets)

        return tuple(m for m in self.modules if m in readers or only_feeds(m))

    def sources(self, module: str) -> tuple[str, ...]:
        """Modules whose outputs it reads."""
        return tuple(dict.fromkeys(e.source for e in self.edges if e.target == module))

    def targets(self, module: str) -> tuple[str, ...]:
        """Modules that read its outputs."""
        return tuple(dict.fromkeys(e.target for e in self.edges if e.source == module))


@dataclass(frozen=True)
class Scheduling:
    """How the batches of a run are divided into groups and ordered."""

    # How samples meet microbatches: min-max and packed, or in order, one sample a row.
    grouping: Grouping = "balanced"
    order: Order = "1f1b"
    # Groups in flight beyond 1F1B's, so that unlike ones do not leave a submesh waiting.
    lookahead: int = 0
    # Limit of the solver of one batch in units of work (pairs of rows priced), so that the step
    # hides it; 0: the scheduler's default.
    work_budget: int = 0
    node: int = 0  # devices that share a node, counted from the first; 0: all do
    residuals: tuple[ResidualBytes, ...] = ()  # of the segments with two recompute policies
    # By submesh, what of a device's memory is left when every segment keeps as many groups as it
    # ever may under the first policy.
    free_bytes: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("lookahead", "node"):
            n = getattr(self, name)
            require(n >= 0, f"{name} {n} must not be negative")
        for name, kind in (("order", Order), ("grouping", Grouping)):
            value, values = getattr(self, name), get_args(kind)
            require(value in values, f"{name} {value!r} is not {' or '.join(values)}")


@dataclass(frozen=True)
class Plan:
    """The static plan of a run: its programs, how batches are scheduled, and predictions."""

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
