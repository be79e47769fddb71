"""What is measured before planning."""

from __future__ import annotations

from dataclasses import dataclass, field

from dflop_jax.records.check import require
from dflop_jax.records.data import DataProfile, Shape
from dflop_jax.records.plan import Edge


@dataclass(frozen=True)
class LayerTiming:
    """Measured seconds of one module at one per-rank shape and tensor-parallel degree.

    `layer_*` is one layer; `ends_*` is entry plus exit. Backward includes the recomputed forward.
    `pair_*` are a layer's seconds for each pair of tokens of one piece, which the others then do
    not contain; 0 where attention is computed for whole rows. `layer_temp_bytes` grows with each
    layer of a segment, `ends_temp_bytes` is there once; `hidden_bytes` is what a segment keeps of
    its input from forward to backward.
    """

    module: str
    model: int
    shape: Shape
    layer_forward_s: float
    layer_backward_s: float
    ends_forward_s: float
    ends_backward_s: float
    layer_temp_bytes: float = 0.0
    ends_temp_bytes: float = 0.0
    hidden_bytes: float = 0.0
    pair_forward_s: float = 0.0
    pair_backward_s: float = 0.0


@dataclass(frozen=True)
class ModelProfile:
    """Times and bytes of a model's modules on one kind of device; `key` names what was measured.

    `concurrency` is how many devices really compute at once: the device count on accelerators,
    fewer where pretended CPU devices share cores. `entry_share` is the part of the ends' work that
    is the entry's. `edges` and `tied` are the model's; `n_layers` names its modules in topological
    order. `piece_tokens` holds the modules whose rows take one piece each, and its tokens; the
    others pack pieces of any length into a row.
    """

    key: str
    device: str
    timings: tuple[LayerTiming, ...]
    layer_param_bytes: dict[str, int]
    ends_param_bytes: dict[str, int]
    n_layers: dict[str, int]
    entry_share: dict[str, float]
    concurrency: float
    task_overhead_s: float = 0.0
    edges: tuple[Edge, ...] = ()
    tied: tuple[str, ...] = ()
    piece_tokens: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(len(self.timings) > 0, "a model profile needs timings")
        require(self.concurrency > 0, "concurrency must be above 0")


@dataclass(frozen=True)
class Profile:
    """What was measured before planning: the model on its devices, and the data."""

    model: ModelProfile
    data: DataProfile
