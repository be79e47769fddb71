"""Records of the module graph and of the plan that places modules on devices."""

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
Count = TypeVar("Count", int, np.ndarray)  # one number, or an array over granularities


@dataclass(frozen=True)
class Edge:
    """An edge of the module graph: `target` reads outputs of `source`."""

    source: str
    target: str
    name: str  # field that the target reads; edges with the same name are summed
    tap: str = ""  # tap of the source that gives the output; "": its exit
    leaves: int = -1  # number of source layers before the tap; -1: all, at its exit
    enters: int = -1  # number of target layers before the input; -1: none, at its entry
    sources: int = 1  # number of outputs in the weighted sum at each position; 1: a copy

    def __post_init__(self) -> None:
        is_named = self.source != self.target and bool(self.name) and self.sources >= 1
        require(is_named, f"an edge needs two modules, a field name and sources >= 1, got {self}")
        has_layers = (self.leaves >= 0) == bool(self.tap) and min(self.leaves, self.enters) >= -1
        require(has_layers, f"an edge needs `leaves` >= 0 exactly if it has a tap, got {self}")


@dataclass(frozen=True)
class SegmentPlan:
    """Layers [start, stop) of a module on a submesh; the first and last segment have its ends.

    `remat` selects what the backward task recomputes to save memory: "none": only elementwise work;
    "dots": all except products with weights; "named": all except outputs that the model names
    (attention); "layers": each layer from its input; "segment": the whole segment from its input. A
    segment without readers runs forward and backward in one task; there "segment" means "none", and
    the other policies apply within the task.
    """

    name: str
    module: str
    start: int
    stop: int
    submesh: str
    first: bool
    last: bool
    remat: Remat = "none"
    # ZeRO stage: 1 shards optimizer state over data ranks, 2 gradients too, 3 parameters too.
    zero: Zero = 1
    # Second policy that saves more residuals, compiled in addition to `remat`, for groups that run
    # while memory is free (see `Group.remat_less`).
    remat_less: Remat | None = None
    # Hybrid sharding: number of neighbouring devices to shard over, if such blocks contain several
    # whole data ranks and divide them evenly; otherwise, and for 0, shard over all data ranks.
    shard_devices: int = 0
    # Number of times that a microbatch passes the stages of its submesh, each time through another
    # chunk of each stage's layers.
    rounds: int = 1
    # Whether programs with a gradient unroll the layers of a stage, instead of looping over them.
    # GPUs unroll a few layers in any case, ZeRO 3 loops; see `unrolls_layers`.
    unrolled: bool = False

    def __post_init__(self) -> None:
        name = f"segment {self.name!r}"
        require(self.shard_devices >= 0, f"{name}: shard_devices is negative")
        require(self.rounds >= 1, f"{name}: rounds={self.rounds} is not positive")
        require(self.stop > self.start >= 0, f"{name} has no layer")
        require(self.remat in REMAT, f"{name}: remat={self.remat!r} not in {REMAT}")
        require(self.zero in ZERO, f"{name}: zero={self.zero!r} not in {ZERO}")
        keeps_more = self.remat_less in (None, *REMAT[: REMAT.index(self.remat)])
        require(keeps_more, f"{name}: remat_less={self.remat_less!r} saves no more than remat")

    @property
    def n_layers(self) -> int:
        return self.stop - self.start

    def ticks(self, stages: int, microbatches: Count) -> Count:
        """Return the ticks of a group's pipeline; each stage is idle in `stages` - 1 of them."""
        return self.rounds * microbatches + stages - 1

    def shard_ranks(self, data: Any, model: int) -> Any:
        """Return over how many of `data` ranks (`model` devices each) a parameter is sharded."""
        ranks, data = self.shard_devices // model, np.asarray(data)
        return np.where((ranks > 1) & (data % max(ranks, 1) == 0), ranks, data)[()]

    def chunk_layers(self, stages: int) -> int:
        """Return the number of layers that a microbatch passes in one stage and round."""
        return self.n_layers // (stages * self.rounds)

    def unrolls_layers(self, stages: int, max_unrolled: int) -> bool:
        """Return whether programs with a gradient unroll the layers of a stage and round. A loop
        compiles in the time of one layer, but copies each layer's residuals into stacks.

        Args:
          max_unrolled: number of layers that the chip unrolls in any case.
        """
        # With ZeRO 3, a separate loop gathers each layer one layer ahead.
        return self.zero < 3 and (self.unrolled or self.chunk_layers(stages) <= max_unrolled)

    @property
    def with_less_remat(self) -> SegmentPlan:
        """The segment under its second recompute policy, `remat_less`."""
        assert self.remat_less is not None, f"{self.name} has one recompute policy"
        return dataclasses.replace(self, remat=self.remat_less, remat_less=None)

    def sends(self, edge: Edge) -> bool:
        """Return whether the edge starts in this segment; a tap starts in its layer's segment."""
        if edge.source != self.module:
            return False
        return self.last if edge.leaves < 0 else self.runs_through(edge.leaves)

    def runs_through(self, layers: int) -> bool:
        """Return whether the module's first `layers` layers end inside this segment."""
        return self.start < layers <= self.stop or (self.first and layers == 0)

    def reads(self, edge: Edge) -> bool:
        """Return whether the edge ends in this segment."""
        if edge.target != self.module:
            return False
        if edge.enters < 0:
            return self.first
        return self.start <= edge.enters < self.stop or (self.last and edge.enters == self.stop)


@dataclass(frozen=True)
class ExchangeCapacity:
    """Capacity of one round of the exchange between groups of two modules with these shapes."""

    source: str
    target: str
    source_shape: Shape
    target_shape: Shape
    share: float  # of a rank's features that one data rank can send to another

    def __post_init__(self) -> None:
        require(0 < self.share <= 1, f"a capacity needs 0 < share <= 1, got {self}")


@dataclass(frozen=True)
class ResidualBytes:
    """Bytes per device that a segment saves for the backward of a group of this shape."""

    segment: str
    shape: Shape
    n_bytes: float
    more_bytes: float  # additional bytes under the second recompute policy


@dataclass(frozen=True)
class Predicted:
    """Predictions of the planner for a mean step of a plan."""

    makespan_s: float = 0.0  # from the plan's own programs if they were timed, else `chosen_by_s`
    busy_fraction: dict[str, float] = field(default_factory=dict)  # computing share, by submesh
    peak_bytes: dict[str, float] = field(default_factory=dict)  # per device, by submesh
    chosen_by_s: float = 0.0  # step time predicted from the profile's single layers
    priced_by: str = ""  # source of the prices, in words
    buckets_by: str = ""  # method that chose the buckets, in words


@dataclass(frozen=True)
class TrialResult:
    """Step times of a plan that a run trained a few steps under, to choose between plans."""

    policy: str
    predicted_s: float  # by the profile, before any step
    measured_s: float  # median of its steps; 0: not measured
    calibrated_s: float  # of the batches that all plans are compared on; 0: not measured
    n_steps: int  # measured steps
    outcome: str  # whether it was chosen, and why


@dataclass(frozen=True)
class Layout:
    """The part of a plan that determines its compiled programs: equal layouts share programs."""

    submeshes: tuple[SubmeshPlan, ...]
    segments: tuple[SegmentPlan, ...]  # module by module, each module after its sources
    buckets: tuple[Bucket, ...] = ()  # () before they are chosen
    edges: tuple[Edge, ...] = ()
    group_size: int = 1  # microbatches per program call
    # Maximum number of groups in which a `divided` module processes one group of other modules.
    # Divided modules are those without sources, several of whose groups feed one group, and
    # `divided_readers`, several of whose groups read one group.
    fan_in: int = 1
    divided_readers: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()  # modules whose exit reads the parameters of their entry
    # Capacities that sufficed for the planner's sampled batches.
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
            require(has_submesh, f"segment {s.name!r} has unknown submesh {s.submesh!r}")
            self._check_stages(s)
        for module in self.modules:
            segments = self.segments_of(module)
            starts = [0, *(s.stop for s in segments[:-1])]
            ends = [(i == 0, i == len(segments) - 1) for i in range(len(segments))]
            joins = [(s.start, (s.first, s.last)) for s in segments] == [*zip(starts, ends)]
            require(joins, f"segments of {module!r} are not consecutive")
            for name in ("zero", "shard_devices"):
                values = {getattr(s, name) for s in segments}
                differ = f"segments of {module!r} have {name}={sorted(values)}; use one value"
                require(len(values) == 1, differ)
        names = [module for module, _ in groupby(s.module for s in self.segments)]
        require(len(names) == len(set(names)), f"segments are not sorted by module: {names}")
        for e in self.edges:
            indices = [names.index(m) for m in (e.source, e.target) if m in names]
            require(
                len(indices) == 2 and indices[0] < indices[1],
                f"edge {e.source} -> {e.target}: the plan must have the source before the target; "
                f"it has {names}",
            )
        require(len(set(self.buckets)) == len(self.buckets), "buckets repeat; list each once")
        for b in self.buckets:
            unknown = {m for m, _ in b.shapes} - {*names}
            require(not unknown, f"bucket {b.name} has modules {unknown} that the plan lacks")

    def _check_stages(self, s: SegmentPlan) -> None:
        stage = self.submesh(s.submesh).stage
        name, n = f"segment {s.name!r}", s.n_layers
        require(n % stage == 0, f"{name}: {n} layers are not divisible into {stage} stages")
        require(
            s.rounds == 1 or (stage > 1 and n % (stage * s.rounds) == 0),
            f"{name}: {s.rounds} rounds need several stages, and a number of layers divisible by "
            f"stages x rounds; it has stage={stage} and {n} layers: use rounds=1",
        )
        is_multiple = self.group_size % stage == 0
        require(is_multiple, f"group_size {self.group_size} must be a multiple of stage={stage}")
        sends = any(e.leaves >= 0 and s.sends(e) for e in self.edges)
        reads = any(e.enters >= 0 and s.reads(e) for e in self.edges)
        require(
            stage == 1 or not (sends or reads),
            f"{name} has {stage} stages and an edge at an inner layer; use segments instead",
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
        """Return the data-parallel degree of a module, which all its segments share."""
        ranks = {self.submesh(s.submesh).data for s in self.segments_of(module)}
        require(len(ranks) == 1, f"segments of {module!r} differ in data parallelism: {ranks}")
        return ranks.pop()

    def exchange_capacity(
        self, edge: Edge, source_shape: Shape, target_shape: Shape
    ) -> float | None:
        """Return the share of a rank's features that a round sends to another; None: unknown."""
        key = edge.source, edge.target, source_shape, target_shape
        for r in self.exchange_capacities:
            if (r.source, r.target, r.source_shape, r.target_shape) == key:
                return r.share
        return None

    def devices(self, module: str) -> tuple[int, ...]:
        """Return the first device of each data rank of a module's last segment."""
        mesh = self.submesh(self.segments_of(module)[-1].submesh)
        return tuple(mesh.first + rank * mesh.stride("data") for rank in range(mesh.data))

    def shapes(self, module: str) -> tuple[Shape, ...]:
        """Return the module's compiled shapes in the order of the buckets."""
        shapes = (b.shape(module) for b in self.buckets)
        return tuple(dict.fromkeys(s for s in shapes if s is not None))

    @cached_property
    def divided(self) -> tuple[str, ...]:
        """Modules with several groups per group of other modules (see `fan_in`)."""
        if self.fan_in == 1:
            return ()
        readers = set(self.divided_readers)

        def only_feeds(m: str) -> bool:
            targets = self.targets(m)
            return bool(targets) and not self.sources(m) and readers.isdisjoint(targets)

        return tuple(m for m in self.modules if m in readers or only_feeds(m))

    def sources(self, module: str) -> tuple[str, ...]:
        """Return the modules whose outputs the module reads."""
        return tuple(dict.fromkeys(e.source for e in self.edges if e.target == module))

    def targets(self, module: str) -> tuple[str, ...]:
        """Return the modules that read the module's outputs."""
        return tuple(dict.fromkeys(e.target for e in self.edges if e.source == module))


@dataclass(frozen=True)
class Scheduling:
    """Settings for dividing a run's batches into groups and ordering their tasks."""

    # "balanced": minimize the maximum load and pack samples; "arrival": in order, one per row.
    grouping: Grouping = "balanced"
    order: Order = "1f1b"
    # Groups in flight beyond 1F1B's, so that submeshes wait less for groups of unequal length.
    lookahead: int = 0
    # Limit of the solver's work units per batch (pairs of rows priced), so that it overlaps with
    # the step; 0: the scheduler's default.
    work_budget: int = 0
    node: int = 0  # devices per node; 0: all devices are on one node
    residuals: tuple[ResidualBytes, ...] = ()  # for segments with two recompute policies
    # Free bytes per device by submesh, when every segment holds its maximum number of groups under
    # the first policy.
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
    """Static plan of a run: the layout of its programs, scheduling settings and predictions."""

    policy: str
    layout: Layout
    scheduling: Scheduling = Scheduling()
    predicted: Predicted = Predicted()
    trials: tuple[TrialResult, ...] = ()  # of the run that chose this plan, if it tried several

    def with_layout(self, **changes: Any) -> Plan:
        """Return the plan with some fields of its layout changed."""
        return dataclasses.replace(self, layout=dataclasses.replace(self.layout, **changes))

    def with_scheduling(self, **changes: Any) -> Plan:
        """Return the plan with some fields of its scheduling changed."""
        scheduling = dataclasses.replace(self.scheduling, **changes)
        return dataclasses.replace(self, scheduling=scheduling)


def with_remat(plan: Plan, remat: Remat) -> Plan:
    """Return the plan with this `remat` in every segment and no second policy."""
    segments = plan.layout.segments
    segments = tuple(dataclasses.replace(s, remat=remat, remat_less=None) for s in segments)
    return plan.with_layout(segments=segments).with_scheduling(residuals=(), free_bytes={})
