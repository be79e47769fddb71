"""Profiles: measurements of a model and its data before planning."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from dflop_jax.records.data import PAIR, DataProfile, Shape, require, scale_coefficients
from dflop_jax.records.hardware import Hardware
from dflop_jax.records.plan import Edge, Remat, SegmentPlan

LAYERS = "layers"  # the kind of all layers if a module does not name kinds


def layer_key(module: str, kind: str = LAYERS) -> str:
    """Return a profile's key for a module's layers of a kind."""
    return module if kind == LAYERS else f"{module}.{kind}"


@dataclass(frozen=True)
class Recompute:
    """Cost of a recompute policy of a module at a shape."""

    # Backward seconds in addition to the gradient without recomputation: of one layer, of both
    # ends, and of one layer per unit of each content feature.
    layer_s: float = 0.0
    ends_s: float = 0.0
    content_s: dict[str, float] = field(default_factory=dict)
    layer_bytes: float = 0.0  # residuals of one layer for one microbatch
    ends_bytes: float = 0.0
    # Temporaries of the backward program besides residuals: a constant, and an amount per layer.
    temp_bytes: float = 0.0
    layer_temp_bytes: float = 0.0
    # Minimum of these temporaries in a program that runs forward, loss and backward.
    loss_bytes: float = 0.0


@dataclass(frozen=True)
class LayerTiming:
    """Time of a module at a per-rank shape; backward is the gradient without recomputation."""

    module: str
    model: int  # tensor-parallel degree
    shape: Shape
    layer_forward_s: float  # of one layer
    layer_backward_s: float
    ends_forward_s: float  # of entry plus exit
    ends_backward_s: float
    hidden_bytes: float = 0.0  # of a segment's input, saved from forward to backward
    # A layer's seconds per unit of each content feature, not included in the seconds above; empty
    # if everything is computed for whole rows.
    content_forward_s: dict[str, float] = field(default_factory=dict)
    content_backward_s: dict[str, float] = field(default_factory=dict)
    # Costs by policy; "segment" is derived from "none", since it recomputes everything.
    recompute: dict[Remat, Recompute] = field(default_factory=lambda: {"none": Recompute()})
    kind: str = LAYERS
    output_bytes: float = 0.0  # of the module's features that an edge reads

    @property
    def layers(self) -> str:
        """The profile's key for these layers; see `layer_key`."""
        return layer_key(self.module, self.kind)

    def __post_init__(self) -> None:
        require("none" in self.recompute, "a timing needs the cost of the recompute policy none")
        require("segment" not in self.recompute, "the policy segment is derived from none")

    def scaled(self, factor: float) -> LayerTiming:
        """Return the timing with all seconds multiplied by `factor`."""
        recompute = {p: replace(r, **_seconds(r, factor)) for p, r in self.recompute.items()}
        return replace(self, recompute=recompute, **_seconds(self, factor))


def _seconds(record: LayerTiming | Recompute, factor: float) -> dict[str, Any]:
    """Return a record's seconds by field, multiplied by `factor`."""
    return {
        name: scale_coefficients(factor, v) if isinstance(v, dict) else factor * v
        for name, v in vars(record).items()
        if name.endswith("_s")
    }


@dataclass(frozen=True)
class ParamDims:
    """Sizes and bytes per element of a parameter."""

    sizes: tuple[int, ...]
    split: int = -1  # the dim that tensor parallelism splits; -1: none
    element_state_bytes: float = 8.0  # optimizer state per element, here two float32 moments
    trains: bool = True
    working_bytes: int = 4  # per element, as programs read the parameter

    @property
    def trained_bytes(self) -> float:
        """Bytes per element of the gradient, or of the master; 0 if the parameter is frozen."""
        return 4.0 * self.trains

    @property
    def trained_working_bytes(self) -> float:
        return self.working_bytes * float(self.trains)


@dataclass(frozen=True)
class ModelProfile:
    """Times and bytes of a model's modules on one kind of device."""

    key: str  # digest of everything that the profile depends on
    device: str
    timings: tuple[LayerTiming, ...]
    # Each parameter separately, since data ranks shard each one evenly.
    layer_dims: dict[str, tuple[ParamDims, ...]]  # by `layer_key`
    ends_dims: dict[str, tuple[ParamDims, ...]]  # by module
    n_layers: dict[str, int]  # by module, in topological order
    entry_share: dict[str, float]  # the entry's share of the time of both ends, by module
    # Number of devices that can compute at the same time; fewer if simulated CPU devices share
    # cores.
    concurrency: float
    task_overhead_s: float = 0.0
    edges: tuple[Edge, ...] = ()
    tied: tuple[str, ...] = ()
    # Tokens per row of modules whose rows hold one piece each; other modules pack pieces into rows.
    piece_tokens: dict[str, int] = field(default_factory=dict)
    host_s: float = 0.0  # the dispatching thread's seconds per task (`add_host_work`)
    priced_by: str = ""  # source of the times, in words
    computed: bool = False  # times are from formulas for any size, not from runs
    hardware: Hardware | None = None  # gives transfer times; None: transfers take no time
    kinds: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by layer, if a module has any
    content: dict[str, tuple[str, ...]] = field(default_factory=dict)  # feature names, if any
    n_timed: int = 0  # shapes timed per module; the others are extrapolated by the roofline model
    shape_s: float = 0.0  # seconds that timing one shape of every module took
    flops_per_s: float = 0.0  # measured in products on all devices at once

    def __post_init__(self) -> None:
        require(len(self.timings) > 0, "a model profile needs timings")
        for t in self.timings:
            named, features = (*t.content_forward_s, *t.content_backward_s), self.features(t.module)
            unknown = [name for name in named if name not in features]
            require(not unknown, f"{t.module!r} lacks features {unknown[:1]}; profile again")
        for module, kinds in self.kinds.items():
            n = self.n_layers.get(module)
            require(len(kinds) == n, f"{module!r} has {n} layers but {len(kinds)} layer kinds")
        require(self.concurrency > 0, "concurrency must be above 0")

    @property
    def shares_cores(self) -> bool:
        """Whether the devices are cores of the host that dispatches tasks to them."""
        return self.device == "cpu"

    @property
    def devices_per_node(self) -> int:
        """Devices per node; 0 if unknown."""
        return self.hardware.devices_per_node if self.hardware else 0

    def layer_kinds(self, module: str) -> tuple[str, ...]:
        """Return the kind of every layer of a module."""
        return self.kinds.get(module) or (LAYERS,) * self.n_layers[module]

    def kinds_in(self, segment: SegmentPlan) -> dict[str, int]:
        """Return a segment's number of layers by kind, in order of first occurrence."""
        kinds = self.kinds.get(segment.module)
        return Counter(kinds[segment.start : segment.stop]) if kinds else {LAYERS: segment.n_layers}

    def features(self, module: str) -> tuple[str, ...]:
        """Return the names of a module's content features, in order."""
        return self.content.get(module, (PAIR,))

    def ends_elements(self, module: str) -> int:
        """Return the number of parameters of both ends of a module."""
        return sum(prod(p.sizes) for p in self.ends_dims[module])

    def n_elements(self, module: str) -> int:
        """Return the number of parameters of a module."""
        layers = (self.layer_dims[layer_key(module, kind)] for kind in self.layer_kinds(module))
        return self.ends_elements(module) + sum(prod(p.sizes) for dims in layers for p in dims)

    def has_bfloat16_params(self, module: str) -> bool:
        """Return whether a module's programs use bfloat16 parameters with float32 masters."""
        layers = (self.layer_dims[layer_key(module, k)] for k in set(self.layer_kinds(module)))
        dims_by_part = self.ends_dims[module], *layers
        return any(p.working_bytes < 4 for dims in dims_by_part for p in dims)


@dataclass(frozen=True)
class Profile:
    """Measurements before planning: of the model on its devices, and of the data."""

    model: ModelProfile
    data: DataProfile

    def __post_init__(self) -> None:
        for m in self.model.n_layers:
            n = len(self.model.features(m))
            require(
                all(len(c) == n for load in self.data.loads for c in load.content_of(m)),
                f"samples lack the content of {m!r} ({n} features); profile again",
            )
