"""Profiles: what is measured of a model and its data before planning."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any

from dflop_jax.records.check import require
from dflop_jax.records.data import DataProfile, Shape
from dflop_jax.records.features import PAIR, scale_coefficients
from dflop_jax.records.hardware import Hardware
from dflop_jax.records.plan import Edge, Remat, SegmentPlan

LAYERS = "layers"  # the kind of all layers of a module that does not name kinds


def layer_key(module: str, kind: str = LAYERS) -> str:
    """Return a profile's name for the layers of one kind of a module; the module's own name if it
    names no kinds."""
    return module if kind == LAYERS else f"{module}.{kind}"


@dataclass(frozen=True)
class Recompute:
    """The cost of a recompute policy of a module at a shape.

    Attributes:
      layer_s, ends_s: seconds by which backward of one layer, and of both ends, exceeds the
        gradient from everything that forward computed.
      content_s: the same of a layer for a unit of each feature of content, by name.
      layer_bytes, ends_bytes: kept from forward to backward, of one microbatch.
      temp_bytes: temporaries of the backward program beside what was kept, however many layers it
        has; `layer_temp_bytes`: more of them for each layer; `loss_bytes`: what one that runs
        forward, too, and ends in a loss takes at least, beside what would be kept.
    """

    layer_s: float = 0.0
    ends_s: float = 0.0
    content_s: dict[str, float] = field(default_factory=dict)
    layer_bytes: float = 0.0
    ends_bytes: float = 0.0
    temp_bytes: float = 0.0
    layer_temp_bytes: float = 0.0
    loss_bytes: float = 0.0


@dataclass(frozen=True)
class LayerTiming:
    """Measured seconds of one module at one per-rank shape and tensor-parallel degree.

    `layer_*` is one layer, of a `kind`; `ends_*` is entry plus exit. Backward is the gradient
    alone, from all that forward computed. `content_*` are a layer's seconds for a unit of each
    feature of content, by name, which the others then do not contain; none where all is computed
    for whole rows.
    `hidden_bytes` is what a segment keeps of its input from forward to backward. `recompute` holds
    the policies that are known; "segment" follows from "none", of which it computes all again.
    """

    module: str
    model: int
    shape: Shape
    layer_forward_s: float
    layer_backward_s: float
    ends_forward_s: float
    ends_backward_s: float
    hidden_bytes: float = 0.0
    content_forward_s: dict[str, float] = field(default_factory=dict)
    content_backward_s: dict[str, float] = field(default_factory=dict)
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
        """Return the timing with `factor` times the seconds."""
        recompute = {p: replace(r, **_seconds(r, factor)) for p, r in self.recompute.items()}
        return replace(self, recompute=recompute, **_seconds(self, factor))


def _seconds(record: LayerTiming | Recompute, factor: float) -> dict[str, Any]:
    """Return the seconds of a record by field, times `factor`."""
    values = {f.name: getattr(record, f.name) for f in fields(record) if f.name.endswith("_s")}
    return {
        name: scale_coefficients(factor, v) if isinstance(v, dict) else factor * v
        for name, v in values.items()
    }


@dataclass(frozen=True)
class ParamDims:
    """Sizes of a parameter's dims, which of them tensor parallelism splits (-1: none), the bytes
    that the optimizer keeps of each element, shared like these; whether it trains; and the bytes of
    an element as programs read it."""

    sizes: tuple[int, ...]
    split: int = -1
    element_state_bytes: float = 8.0  # two moments in float32
    trains: bool = True
    working_bytes: int = 4

    @property
    def trained_bytes(self) -> float:
        """Bytes of an element's gradient, or of its master; 0 if it is frozen."""
        return 4.0 * self.trains

    @property
    def trained_working_bytes(self) -> float:
        return self.working_bytes * float(self.trains)


@dataclass(frozen=True)
class ModelProfile:
    """Times and bytes of a model's modules on one kind of device; `key` names what was measured,
    `priced_by` says what the times are of.

    `concurrency` is how many devices really compute at once: the device count on accelerators,
    fewer where pretended CPU devices share cores. `entry_share` is the part of the ends' work that
    is the entry's. `edges` and `tied` are the model's; `n_layers` names its modules in topological
    order. `piece_tokens` holds the modules whose rows take one piece each, and its tokens; the
    others pack pieces of any length into a row. `layer_dims` and `ends_dims` hold the parameters
    one by one, since data ranks cut each of them into equal pieces. `host_s` is the work of a
    process's dispatching thread for a task (see `prices.add_host_work`). `computed`: seconds come
    from formulas that hold at any size, not from runs. `hardware` says what crosses nodes and links
    takes; None: no time. `kinds` says of each layer of the modules that name kinds which one it is;
    what is said of a layer is by `layer_key`. `content` has, in their order, the features of the
    modules that name those of their content.
    """

    key: str
    device: str
    timings: tuple[LayerTiming, ...]
    layer_dims: dict[str, tuple[ParamDims, ...]]
    ends_dims: dict[str, tuple[ParamDims, ...]]
    n_layers: dict[str, int]
    entry_share: dict[str, float]
    concurrency: float
    task_overhead_s: float = 0.0
    edges: tuple[Edge, ...] = ()
    tied: tuple[str, ...] = ()
    piece_tokens: dict[str, int] = field(default_factory=dict)
    host_s: float = 0.0
    priced_by: str = ""
    computed: bool = False
    hardware: Hardware | None = None
    kinds: dict[str, tuple[str, ...]] = field(default_factory=dict)
    content: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(len(self.timings) > 0, "a model profile needs timings")
        for t in self.timings:
            feature_names = self.features(t.module)
            unknown_features = [
                n for n in (*t.content_forward_s, *t.content_backward_s) if n not in feature_names
            ]
            require(
                not unknown_features,
                f"{t.module!r} has no content {unknown_features[:1]}; profile again",
            )
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
        """Return the kind of every layer of a module."""
        return self.kinds.get(module) or (LAYERS,) * self.n_layers[module]

    def kinds_in(self, segment: SegmentPlan) -> dict[str, int]:
        """Return the number of a segment's layers of each kind, in order of first occurrence."""
        kinds = self.kinds.get(segment.module)
        return Counter(kinds[segment.start : segment.stop]) if kinds else {LAYERS: segment.n_layers}

    def features(self, module: str) -> tuple[str, ...]:
        """Return the features of a module's content, in their order."""
        return self.content.get(module, (PAIR,))

    def ends_elements(self, module: str) -> int:
        """Return the number of parameters of both ends of a module."""
        return sum(prod(p.sizes) for p in self.ends_dims[module])

    def n_elements(self, module: str) -> int:
        """Return the number of parameters of a module."""
        layers = (self.layer_dims[layer_key(module, kind)] for kind in self.layer_kinds(module))
        return self.ends_elements(module) + sum(prod(p.sizes) for dims in layers for p in dims)

    def has_bfloat16_params(self, module: str) -> bool:
        """Whether a module's programs work on bfloat16 parameters, with float32 masters in the
        optimizer's shards."""
        kinds = dict.fromkeys(self.layer_kinds(module))
        dims_by_part = [
            self.ends_dims[module],
            *(self.layer_dims[layer_key(module, k)] for k in kinds),
        ]
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
