"""The frozen records that flow from stage to stage.

Every arrow of the data flow (profile -> plan -> schedule -> trace) is one of these. A record
validates itself when made, so a wrong one cannot exist; `record_files` writes and reads it as
versioned JSON, so every stage can run alone from a file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

FORWARD, BACKWARD, REDUCE, UPDATE = "forward", "backward", "reduce", "update"
# Between submeshes, in traces: activations of a segment, and the gradients that come back to it.
SEND, RETURN = "send", "return"
REMAT = ("none", "layers", "dots")
# Encoders, and what SampleShape and Bucket call the items that they work on.
ITEMS = {"vision": "tiles", "audio": "windows"}


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


@dataclass(frozen=True)
class SampleShape:
    """What one sample costs, known from headers and text before anything is decoded.

    `tiles` counts everything the vision encoder sees (image tiles and video frames); `windows` of
    sound are the audio encoder's; `llm_tokens` counts everything the LLM sees (text, visual tokens
    and those of sound).
    """

    tiles: int
    text_tokens: int
    llm_tokens: int
    frames: int = 0
    windows: int = 0

    def __post_init__(self) -> None:
        counts = (self.tiles, self.text_tokens, self.frames, self.windows)
        _require(
            min(counts) >= 0 and self.llm_tokens >= 1,
            f"a sample shape needs counts >= 0 and at least one LLM token, got {self}",
        )

    def load(self, module: str) -> int:
        """Items of an encoder, tokens of the LLM: the unit its capacity is stated in."""
        return self.llm_tokens if module == "llm" else getattr(self, ITEMS[module])


@dataclass(frozen=True)
class DataProfile:
    """Sample shapes of (a part of) a dataset of `n_total` samples."""

    source: str
    n_total: int
    shapes: tuple[SampleShape, ...]

    def __post_init__(self) -> None:
        _require(len(self.shapes) > 0, f"no usable sample in {self.source or 'the dataset'}")


@dataclass(frozen=True)
class ModuleShape:
    """Static shape of one module's microbatch on one data rank: `items` rows of `tokens`.

    For an encoder an item is a tile; for the LLM it is a row of packed tokens.
    """

    items: int
    tokens: int

    def __post_init__(self) -> None:
        _require(self.items >= 0 and self.tokens >= 1, f"bad module shape {self}")

    @property
    def size(self) -> int:
        return self.items * self.tokens


@dataclass(frozen=True)
class Bucket:
    """Capacity per data rank that microbatches are padded to: one static shape for each module.

    `tiles` are per vision data rank, `windows` of sound per audio data rank; `rows` rows of
    `tokens` tokens are per LLM data rank.
    """

    tiles: int
    tokens: int
    rows: int = 1
    windows: int = 0

    def __post_init__(self) -> None:
        _require(
            min(self.tiles, self.windows) >= 0 and min(self.tokens, self.rows) >= 1,
            f"a bucket needs tiles and windows >= 0, rows >= 1 and tokens >= 1, got {self}",
        )

    @property
    def name(self) -> str:
        sound = f"+{self.windows}" if self.windows else ""
        return f"{self.tiles}{sound}x{self.rows}x{self.tokens}"

    def items(self, module: str) -> int:
        """Items of a module's microbatch on one of its data ranks: rows of the LLM."""
        return self.rows if module == "llm" else getattr(self, ITEMS[module])

    def shape_of(self, module: str, item_tokens: Mapping[str, int]) -> ModuleShape:
        """Per-rank shape of a module's microbatch in this bucket; `item_tokens` of encoders."""
        tokens = self.tokens if module == "llm" else item_tokens[module]
        return ModuleShape(self.items(module), tokens)


@dataclass(frozen=True)
class SubmeshPlan:
    """A named block of devices [first, first + n_devices) as a (stage, data, model) mesh."""

    name: str
    first: int
    stage: int
    data: int
    model: int

    def __post_init__(self) -> None:
        _require(
            self.first >= 0 and min(self.stage, self.data, self.model) >= 1,
            f"submesh {self.name!r}: axis sizes must be >= 1 and first >= 0, got {self}",
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.stage, self.data, self.model)

    @property
    def n_devices(self) -> int:
        return prod(self.shape)

    @property
    def devices(self) -> range:
        return range(self.first, self.first + self.n_devices)


@dataclass(frozen=True)
class SegmentPlan:
    """Layers [start, stop) of a module on a submesh, with the module's ends where they belong.

    `remat` says what a layer's backward computes again, for less memory: "none", "layers" (all of
    it) or "dots" (all but matrix products).
    """

    name: str
    module: str
    start: int
    stop: int
    submesh: str
    first: bool
    last: bool
    remat: str = "none"

    @property
    def n_layers(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Plan:
    """The static choice for a run.

    `segments` are in topological order: encoder segments, then LLM segments. `group_size`
    microbatches are run by one program call. `grouping` says how samples meet microbatches:
    "balanced" (min-max, packed) or "arrival" (in order, one sample a row). `lookahead` more groups
    than in 1F1B may be in flight, so that unlike ones do not leave a submesh waiting. `predicted`
    holds the planner's figures (`makespan_s`, `busy_fraction.NAME`, `peak_bytes.NAME`, ...).
    """

    policy: str
    submeshes: tuple[SubmeshPlan, ...]
    segments: tuple[SegmentPlan, ...]
    buckets: tuple[Bucket, ...]
    group_size: int = 1
    order: str = "1f1b"
    grouping: str = "balanced"
    lookahead: int = 0
    predicted: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [m.name for m in self.submeshes]
        _require(len(set(names)) == len(names), f"submesh names repeat: {names}")
        _require(len(self.segments) > 0 and len(self.buckets) > 0, "a plan needs segments, buckets")
        _require(self.group_size >= 1, f"group_size {self.group_size} must be at least 1")
        _require(self.lookahead >= 0, f"lookahead {self.lookahead} must not be negative")
        _require(self.order in ("1f1b", "gpipe"), f"order {self.order!r} is not 1f1b or gpipe")
        _require(
            self.grouping in ("balanced", "arrival"),
            f"grouping {self.grouping!r} is not balanced or arrival",
        )
        seg_names = [s.name for s in self.segments]
        _require(len(set(seg_names)) == len(seg_names), f"segment names repeat: {seg_names}")
        for s in self.segments:
            _require(
                s.submesh in names, f"segment {s.name!r} lies on unknown submesh {s.submesh!r}"
            )
            stage = self.submesh(s.submesh).stage
            _require(s.n_layers >= 1, f"segment {s.name!r} holds no layer")
            _require(s.remat in REMAT, f"segment {s.name!r}: remat={s.remat!r} is not of {REMAT}")
            _require(
                s.n_layers % stage == 0,
                f"segment {s.name!r}: {s.n_layers} layers do not divide into {stage} stages; "
                "choose a stage count that divides them or split the module into segments",
            )
            _require(
                self.group_size % stage == 0,
                f"group_size {self.group_size} must be a multiple of stage={stage} "
                f"of {s.submesh!r}",
            )
        for module in self.modules:
            parts = self.segments_of(module)
            joined = [s.start for s in parts][1:] == [s.stop for s in parts][:-1]
            ends = parts[0].start == 0 and parts[0].first and parts[-1].last
            inner = not any(s.first for s in parts[1:]) and not any(s.last for s in parts[:-1])
            _require(joined and ends and inner, f"segments of {module!r} do not join end to end")
        by_module = [s.module for s in self.segments]
        runs = [m for m, before in zip(by_module, [None, *by_module]) if m != before]
        _require(
            len(runs) == len(set(runs)) and runs[-1] == "llm",
            f"segments must stand module by module with 'llm' last, got {runs}",
        )

    @property
    def modules(self) -> tuple[str, ...]:
        """Module names in topological order."""
        return tuple(dict.fromkeys(s.module for s in self.segments))

    @property
    def n_devices(self) -> int:
        return max(m.devices.stop for m in self.submeshes)

    def submesh(self, name: str) -> SubmeshPlan:
        return next(m for m in self.submeshes if m.name == name)

    def segments_of(self, module: str) -> tuple[SegmentPlan, ...]:
        return tuple(s for s in self.segments if s.module == module)

    def data_ranks(self, module: str) -> int:
        """Data-parallel degree of a module; all its segments share it."""
        ranks = {self.submesh(s.submesh).data for s in self.segments_of(module)}
        _require(len(ranks) == 1, f"segments of {module!r} differ in data parallelism: {ranks}")
        return ranks.pop()


def with_remat(plan: Plan, remat: str) -> Plan:
    """The plan with every segment's `remat` replaced."""
    segments = tuple(dataclasses.replace(s, remat=remat) for s in plan.segments)
    return dataclasses.replace(plan, segments=segments)


@dataclass(frozen=True)
class Microbatch:
    """Which samples one microbatch holds: `rows[data_rank][row]` are indices into the batch."""

    bucket: int
    rows: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def samples(self) -> tuple[int, ...]:
        return tuple(i for rank in self.rows for row in rank for i in row)


@dataclass(frozen=True)
class Schedule:
    """One global batch cut into groups of microbatches; a group shares one bucket.

    Times are seconds; `lower_bound_s` bounds the makespan that any assignment of this batch to the
    same plan could reach; `status` is "optimal", "feasible" or "greedy".
    """

    step: int
    groups: tuple[tuple[Microbatch, ...], ...]
    makespan_s: float = 0.0
    lower_bound_s: float = 0.0
    status: str = "greedy"
    elapsed_s: float = 0.0

    def __post_init__(self) -> None:
        for g, group in enumerate(self.groups):
            _require(len(group) > 0, f"group {g} is empty")
            _require(len({m.bucket for m in group}) == 1, f"group {g} mixes buckets")
        seen = self.samples
        _require(len(set(seen)) == len(seen), f"step {self.step}: a sample is scheduled twice")

    @property
    def samples(self) -> tuple[int, ...]:
        return tuple(i for g in self.groups for m in g for i in m.samples)


@dataclass(frozen=True, order=True)
class Task:
    """One program call: a segment, a group of the schedule (-1: per step), a direction."""

    segment: str
    group: int
    direction: str


@dataclass(frozen=True)
class Event:
    """A task that ran (or was simulated) on a submesh, times in seconds from the step's start."""

    submesh: str
    segment: str
    group: int
    direction: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Trace:
    """What happened in one step, or what the simulator says would happen: the same record."""

    step: int
    source: str
    events: tuple[Event, ...]

    @property
    def makespan_s(self) -> float:
        return max((e.end_s for e in self.events), default=0.0)

    def busy_fraction(self) -> dict[str, float]:
        """Share of the makespan in which each submesh computes."""
        total = self.makespan_s
        busy: dict[str, float] = {}
        for e in self.events:
            busy[e.submesh] = busy.get(e.submesh, 0.0) + (e.end_s - e.start_s)
        return {name: (b / total if total > 0 else 0.0) for name, b in busy.items()}


@dataclass(frozen=True)
class LayerTiming:
    """Measured seconds of one module at one per-rank shape and tensor-parallel degree.

    `layer_*` is one layer; `ends_*` is entry plus exit. Backward includes the recomputed forward.
    `layer_temp_bytes` grows with each layer of a segment, `ends_temp_bytes` is there once;
    `hidden_bytes` is what a segment keeps of its input from forward to backward.
    """

    module: str
    model: int
    shape: ModuleShape
    layer_forward_s: float
    layer_backward_s: float
    ends_forward_s: float
    ends_backward_s: float
    layer_temp_bytes: float = 0.0
    ends_temp_bytes: float = 0.0
    hidden_bytes: float = 0.0


@dataclass(frozen=True)
class ModelProfile:
    """Times and bytes of a model's modules on one kind of device; `key` names what was measured.

    `concurrency` is how many devices really compute at once: the device count on accelerators,
    fewer where pretended CPU devices share cores. `entry_share` is the part of the ends' work that
    is the entry's. `item_tokens` are what an encoder works on for one item (patches of a tile).
    """

    key: str
    device: str
    timings: tuple[LayerTiming, ...]
    layer_param_bytes: dict[str, int]
    ends_param_bytes: dict[str, int]
    n_layers: dict[str, int]
    entry_share: dict[str, float]
    item_tokens: dict[str, int]
    concurrency: float
    task_overhead_s: float = 0.0

    def __post_init__(self) -> None:
        _require(len(self.timings) > 0, "a model profile needs timings")
        _require(self.concurrency > 0, "concurrency must be above 0")


@dataclass(frozen=True)
class Profile:
    """What was measured before planning: the model on its devices, and the data."""

    model: ModelProfile
    data: DataProfile
