"""A kind of device in its usual node, and the links between its devices."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

Collective = Literal["send", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "ppermute"]

# Fraction of a device's memory that jax takes, in plans and in runs: driver and libraries take the
# rest.
USABLE_MEMORY = 0.92
# Fraction of jax's memory that plans fill: compiled programs took up to 4% more than predicted.
PLANNED_SHARE = 0.95
_PEAKS = {"bfloat16": "bfloat16_flops", "float16": "bfloat16_flops", "float32": "float32_flops"}


@dataclass(frozen=True)
class Link:
    """The measured speed of a collective between devices."""

    collective: Collective
    across: bool  # of several nodes; else of one node
    bandwidth: float  # bytes/s of each device in one direction
    latency_s: float  # of one step of a ring


@dataclass(frozen=True)
class Hardware:
    """One kind of device in its usual node; bytes/s in one direction, seconds of a ring's step."""

    name: str
    chip: str  # what programs are compiled for (`contract.chip_of`)
    bfloat16_flops: float  # FLOP/s of matrix products
    float32_flops: float  # in TF32 where there is such a thing, as JAX does by default
    memory_bytes: float
    memory_bandwidth: float
    devices_per_node: int
    link_bandwidth: float  # between devices of a node
    link_latency_s: float
    network_bandwidth: float  # a device's share of what joins nodes
    network_latency_s: float
    source: str = ""
    measured: tuple[Link, ...] = ()  # goes before these

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, int | float) and not 0 < value < float("inf"):
                raise ValueError(f"hardware {self.name!r}: {f.name}={value} must be above 0")

    def link(self, collective: Collective, *, across: bool) -> Link | None:
        """The measurement of a collective; None if there is none."""
        matching = (k for k in self.measured if (k.collective, k.across) == (collective, across))
        return next(matching, None)

    def with_links(self, factor: float) -> Hardware:
        """The hardware with `factor` times the bandwidth of its links."""
        faster = {k: factor * getattr(self, k) for k in ("link_bandwidth", "network_bandwidth")}
        measured = tuple(replace(k, bandwidth=factor * k.bandwidth) for k in self.measured)
        return replace(self, measured=measured, **faster)

    @property
    def usable_bytes(self) -> float:
        """Bytes of a device that jax takes."""
        return USABLE_MEMORY * self.memory_bytes

    @property
    def plannable_bytes(self) -> float:
        """Bytes of a device that a plan may fill."""
        return PLANNED_SHARE * self.usable_bytes

    def peak_flops(self, dtype: str) -> float:
        """Dense FLOP/s of matrix products of a dtype; ValueError names known dtypes."""
        if dtype not in _PEAKS:
            raise ValueError(f"no peak is known for dtype {dtype!r}; known: {', '.join(_PEAKS)}")
        return float(getattr(self, _PEAKS[dtype]))
