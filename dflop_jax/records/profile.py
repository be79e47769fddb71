"""Profiles: what is measured of a model and its data before planning."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from dflop_jax.records.data import PAIR, DataProfile, Shape, require, scale_coefficients
from dflop_jax.records.hardware import Hardware
from dflop_jax.records.plan import Edge, Remat, SegmentPlan

LAYERS = "layers"  # the kind of all layers of a module that does not name kinds


def layer_key(module: str, kind: str = LAYERS) -> str:
    """A profile's name for a module's layers of a kind."""
    return module if kind == LAYERS else f"{module}.{kind}"


@dataclass(frozen=True)
class Recompute:
    """The cost of a recompute policy of a module at a shape."""

    # Seconds by which backward of one layer, and of both ends, exceeds the gradient from everything
    # that forward computed, and of a layer for a unit of each feature of content, by name.
    layer_s: float = 0.0
    ends_s: float = 0.0
    content_s: dict[str, float] = field(default_factory=dict)
    layer_bytes: float = 0.0  # kept from forward to backward, of one microbatch
    ends_bytes: float = 0.0
    # Temporaries of the backward program beside what was kept, however many layers it has, and more
    # of them for each layer.
    temp_bytes: float = 0.0
    layer_temp_bytes: float = 0.0
    # What a program that runs forward, too, and ends in a loss takes at least beside that.
    loss_bytes: float = 0.0


@dataclass(frozen=True)
class LayerTiming:
    """Seconds of a module at a per-rank shape and degree; backward is the gradient alone."""

    module: str
    model: int
    shape: Shape
    layer_forward_s: float  # of one layer
    layer_backward_s: float
    ends_forward_s: float  # of entry plus exit
    ends_backward_s: float
    hidden_bytes: float = 0.0  # what a segment keeps of its input from forward to backward
    # A layer's seconds for a unit of each feature of content, by name, which the others then do not
    # contain; none where all is computed for whole rows.
    content_forward_s: dict[str, float] = field(default_factory=dict)
    content_backward_s: dict[str, float] = field(default_factory=dict)
    # Known policies; "segment" follows from "none", of which it computes all again.
    recompute: dict[Remat, Recompute] = field(default_factory=lambda: {"none": Recompute()})
    kind: str = LAYERS

    @property
    def layers(self) -> str:
        """See `layer_key`."""
        return layer_key(self.module, self.kind)

    def __post_init__(self) -> None:
        require("none" in self.recompute, "a timing says at least what the policy none keeps")
        require("segment" not in self.recompute, "the policy segment follows from none")

    def scaled(self, factor: float) -> LayerTiming:
        """The timing with `factor` times the seconds."""
        recompute = {p: replace(r, **_seconds(r, factor)) for p, r in self.recompute.items()}
        return replace(self, recompute=recompute, **_seconds(self, factor))


def _seconds(record: LayerTiming | Recompute, factor: float) -> dict[str, Any]:
    """The seconds of a record by field, times `factor`."""
    return {
        name: scale_coefficients(factor, v) if isinstance(v, dict) else factor * v
        for name, v in vars(record).items()
        if name.endswith("_s")
    }


@dataclass(frozen=True)
class ParamDims:
    """A parameter."""

    sizes: tuple[int, ...]
    split: int = -1  # the dim that tensor parallelism splits; -1: none
    element_state_bytes: float = 8.0  # of the optimizer: two moments in float32
    trains: bool = True
    working_bytes: int = 4  # of an element as programs read it

    @property
    def trained_bytes(self) -> float:
        """Bytes of an element's gradient, or of its master; 0 if it is frozen."""
        return 4.0 * self.trains

    @property
    def trained_working_bytes(self) -> float:
        return self.working_bytes * float(self.trains)


@dataclass(frozen=True)
class ModelProfile:
    """Times and bytes of a model's modules on one kind of device."""

    key: str  # what was measured
    device: str
    timings: tuple[LayerTiming, ...]
    # Parameters one by one, since data ranks cut each of them into equal pieces; by `layer_key`.
    layer_dims: dict[str, tuple[ParamDims, ...]]
    ends_dims: dict[str, tuple[ParamDims, ...]]
    n_layers: dict[str, int]  # of the modules in topological order
    entry_share: dict[str, float]  # part of the ends' work that is the entry's
    # Devices that really compute at once: fewer where pretended CPU devices share cores.
    concurrency: float
    task_overhead_s: float = 0.0
    edges: tuple[Edge, ...] = ()
    tied: tuple[str, ...] = ()
    # Tokens of a row, of the modules whose rows take one piece each; the others pack pieces of any
    # length into a row.
    piece_tokens: dict[str, int] = field(default_factory=dict)
    host_s: float = 0.0  # work of a process's dispatching thread for a task (`add_host_work`)
    priced_by: str = ""  # what the times are of
    computed: bool = False  # by formulas that hold at any size, not by runs
    hardware: Hardware | None = None  # what crosses nodes and links takes; None: no time
    kinds: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of each layer, where named
    content: dict[str, tuple[str, ...]] = field(default_factory=dict)  # features, where named

    def __post_init__(self) -> None:
        require(len(self.timings) > 0, "a model profile needs timings")
        for t in self.timings:
            named, features = (*t.content_forward_s, *t.content_backward_s), self.features(t.module)
            unknown = [name for name in named if name not in features]
            require(not unknown, f"{t.module!r} has no content {unknown[:1]}; profile again")
        for module, kinds in self.kinds.items():
            n = self.n_layers.get(module)
            require(len(kinds) == n, f"{module!r} has {n} layers and kinds of {len(kinds)}")
        require(self.concurrency > 0, "concurrency must be above 0")

    @property
    def shares_cores(self) -> bool:
        """Whether devices are cores of the host that dispatches to them."""
        return self.device == "cpu"

    @property
    def devices_per_node(self) -> int:
        """Devices of a node of the hardware; 0 if unknown."""
        return self.hardware.devices_per_node if self.hardware else 0

    def layer_kinds(self, module: str) -> tuple[str, ...]:
        """The kind of every layer of a module."""
        return self.kinds.get(module) or (LAYERS,) * self.n_layers[module]

    def kinds_in(self, segment: SegmentPlan) -> dict[str, int]:
        """The number of a segment's layers of each kind, in order of first occurrence."""
        kinds = self.kinds.get(segment.module)
        return Counter(kinds[segment.start : segment.stop]) if kinds else {LAYERS: segment.n_layers}

    def features(self, module: str) -> tuple[str, ...]:
        """The features of a module's content, in their order."""
        return self.content.get(module, (PAIR,))

    def ends_elements(self, module: str) -> int:
        """Number of parameters of both ends of a module."""
        return sum(prod(p.sizes) for p in self.ends_dims[module])

    def n_elements(self, module: str) -> int:
        """Number of parameters of a module."""
        layers = (self.layer_dims[layer_key(module, kind)] for kind in self.layer_kinds(module))
        return self.ends_elements(module) + sum(prod(p.sizes) for dims in layers for p in dims)

    def has_bfloat16_params(self, module: str) -> bool:
        """Whether a module's programs work on bfloat16 parameters, beside float32 masters."""
        layers = (self.layer_dims[layer_key(module, k)] for k in set(self.layer_kinds(module)))
        dims_by_part = self.ends_dims[module], *layers
        return any(p.working_bytes < 4 for dims in dims_by_part for p in dims)


@dataclass(frozen=True)
class Profile:
    """The measurements before planning: of the model on its devices, and of the data."""

    model: ModelProfile
    data: DataProfile

    def __post_init__(self) -> None:
        for m in self.model.n_layers:
            n = len(self.model.features(m))
            require(
                all(len(c) == n for load in self.data.loads for c in load.content_of(m)),
                f"samples do not say the content of {m!r} ({n} features); profile again",
            )
