"""Records of a kind of device, its usual node and the links between devices."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

Collective = Literal["send", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "ppermute"]

# Fraction of device memory that JAX preallocates; the driver and libraries use the rest.
USABLE_MEMORY = 0.92
# Fraction of JAX's memory that plans may fill: compiled programs used up to 4% more than predicted.
PLANNED_SHARE = 0.95
# Overlap of gathers and reductions with computation where it is not measured: neither none nor all.
UNKNOWN_OVERLAP = 0.5
_PEAKS = {"bfloat16": "bfloat16_flops", "float16": "bfloat16_flops", "float32": "float32_flops"}
_FP8_SPEED = 2.0  # FLOP/s of FP8 over those of bfloat16, on chips that have FP8


@dataclass(frozen=True)
class Link:
    """Measured speed of a collective between devices."""

    collective: Collective
    across: bool  # between nodes; False: within a node
    bandwidth: float  # bytes/s per device in one direction
    latency_s: float  # per step of a ring


@dataclass(frozen=True)
class Hardware:
    """A kind of device in its usual node; bandwidths in bytes/s per direction."""

    name: str
    chip: str  # compilation target (`contract.chip_of`)
    bfloat16_flops: float  # FLOP/s of matrix products
    float32_flops: float  # in TF32 if supported, as is JAX's default
    memory_bytes: float
    memory_bandwidth: float
    devices_per_node: int
    link_bandwidth: float  # between devices of a node
    link_latency_s: float  # per step of a ring
    network_bandwidth: float  # between nodes, a device's share
    network_latency_s: float
    source: str = ""
    measured: tuple[Link, ...] = ()  # overrides the bandwidths and latencies above
    # Overlap, 0 to 1, of gathers and reductions with products in one program, inside a node and
    # between nodes (`collectives.overlapped_s`); None: not measured.
    link_overlap: float | None = None
    network_overlap: float | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name.endswith("_overlap"):
                if value is not None and not 0 <= value <= 1:
                    raise ValueError(f"hardware {self.name!r}: {f.name}={value} must be 0 to 1")
            elif isinstance(value, int | float) and not 0 < value < float("inf"):
                raise ValueError(f"hardware {self.name!r}: {f.name}={value} must be above 0")

    def link(self, collective: Collective, *, across: bool) -> Link | None:
        """Return the measurement of a collective; None if there is none."""
        matching = (k for k in self.measured if (k.collective, k.across) == (collective, across))
        return next(matching, None)

    def overlap(self, *, across: bool) -> float:
        """Return the overlap factor of links between nodes (`across`) or inside a node."""
        overlap = self.network_overlap if across else self.link_overlap
        return UNKNOWN_OVERLAP if overlap is None else overlap

    def with_links(self, factor: float) -> Hardware:
        """Return the hardware with link bandwidths multiplied by `factor`."""
        faster = {k: factor * getattr(self, k) for k in ("link_bandwidth", "network_bandwidth")}
        measured = tuple(replace(k, bandwidth=factor * k.bandwidth) for k in self.measured)
        return replace(self, measured=measured, **faster)

    @property
    def usable_bytes(self) -> float:
        """Bytes per device that JAX preallocates."""
        return USABLE_MEMORY * self.memory_bytes

    @property
    def plannable_bytes(self) -> float:
        """Bytes per device that a plan may fill."""
        return PLANNED_SHARE * self.usable_bytes

    def peak_flops(self, dtype: str) -> float:
        """Return dense FLOP/s of matrix products of a dtype; ValueError names known dtypes."""
        if dtype.startswith("float8"):
            return _FP8_SPEED * self.bfloat16_flops
        if dtype not in _PEAKS:
            raise ValueError(f"no peak is known for dtype {dtype!r}; known: {', '.join(_PEAKS)}")
        return float(getattr(self, _PEAKS[dtype]))
