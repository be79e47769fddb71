"""Device meshes; all axes are declared in this module.

Code refers to an axis by its name, as in `jax.sharding.Mesh.shape`. To add an axis, add a field
with default 1 to `MeshShape`, in order from the outermost to the innermost axis; plans without it
are read with size 1.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from dflop_jax.records.data import require


@dataclass(frozen=True, order=True)
class MeshShape:
    """Number of devices along each mesh axis, outermost first."""

    stage: int = 1  # pipeline stages of a segment's layers
    # Data-parallel ranks, with the same layers and different rows; an array of degrees if many are
    # priced at once.
    data: int = 1
    model: int = 1  # tensor-parallel degree

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def n_devices(self) -> int:
        return prod(self.sizes)

    @property
    def text(self) -> str:
        """The axis sizes as text, such as 1x2x4."""
        return "x".join(map(str, self.sizes))

    def block(self, name: str, first: int) -> SubmeshPlan:
        """Return a submesh of this shape that starts at device `first`."""
        return SubmeshPlan(name, first, *self.sizes)

    def stride(self, axis: str) -> int:
        """Return the difference of device numbers between neighbours on an axis."""
        return prod(self.sizes[AXES.index(axis) + 1 :])


AXES = tuple(f.name for f in fields(MeshShape))
# Axes that programs map manually (`shard_map`); XLA's partitioner handles the other axes according
# to the parameters' shardings.
MANUAL_AXES = ("stage", "data")


@dataclass(frozen=True)
class _Block:
    name: str
    first: int


@dataclass(frozen=True)
class SubmeshPlan(MeshShape, _Block):
    """A named block of devices [first, first + n_devices) as a mesh. The order of bases puts the
    fields `name` and `first` first."""

    def __post_init__(self) -> None:
        require(
            self.first >= 0 and min(self.sizes) >= 1,
            f"submesh {self.name!r}: axis sizes must be >= 1 and first >= 0, got {self}",
        )

    @cached_property
    def shape(self) -> MeshShape:
        return MeshShape(*self.sizes)

    @property
    def devices(self) -> range:
        return range(self.first, self.first + self.n_devices)


# ---- how tensor ranks split hidden states between layers, for programs and prices ----


def token_dim(rows: int, tokens: int, tp: int) -> int | None:
    """Return the dim of hidden states [rows, tokens, width] split over tensor ranks; None: none."""
    if tp == 1:
        return None
    return next((dim for dim, size in enumerate((rows, tokens)) if size % tp == 0), None)


def tp_share(rows: Any, tokens: Any, tp: int) -> Any:
    """Return a tensor rank's share of hidden states [rows, tokens, width]; accepts arrays."""
    divides = (np.asarray(rows) % tp == 0) | (np.asarray(tokens) % tp == 0)
    return np.where(divides, 1 / tp, 1.0)[()]
