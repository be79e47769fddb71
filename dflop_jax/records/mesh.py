"""Meshes of devices: the one module that names all of their axes.

Code refers to an axis by its name, in `MeshShape` as in jax's `Mesh.shape`. A new axis is a field
of `MeshShape` with default 1, between its neighbours from the outermost to the innermost axis;
plans without it are read with size 1.
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
    """Devices along each axis of a mesh, the outermost axis first."""

    stage: int = 1  # parts of a segment's layers, which microbatches pass one after the other
    # Ranks that hold the same layers and take different rows; where many degrees are priced at
    # once, an array of them.
    data: int = 1
    model: int = 1  # devices that split every tensor of a layer

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def n_devices(self) -> int:
        return prod(self.sizes)

    @property
    def text(self) -> str:
        """Its sizes, as 1x2x4."""
        return "x".join(map(str, self.sizes))

    def block(self, name: str, first: int) -> SubmeshPlan:
        """Devices from `first` on as such a mesh."""
        return SubmeshPlan(name, first, *self.sizes)

    def stride(self, axis: str) -> int:
        """Devices from one place on an axis to the next, counted as they are numbered."""
        return prod(self.sizes[AXES.index(axis) + 1 :])


AXES = tuple(f.name for f in fields(MeshShape))
# Axes along which programs say themselves what every device does; XLA's partitioner splits along
# the others, as the parameters' shardings say.
MANUAL_AXES = ("stage", "data")


@dataclass(frozen=True)
class _Block:
    name: str
    first: int


@dataclass(frozen=True)
class SubmeshPlan(MeshShape, _Block):
    """A named block of devices [first, first + n_devices) as a mesh; in this order of bases, name
    and first are the first of its fields."""

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


# ---- how tensor ranks split hidden states between layers: one rule for programs and prices ----


def token_dim(rows: int, tokens: int, tp: int) -> int | None:
    """The dim of hidden states [rows, tokens, width] split over tensor ranks; None: none."""
    if tp == 1:
        return None
    return next((dim for dim, size in enumerate((rows, tokens)) if size % tp == 0), None)


def tp_share(rows: Any, tokens: Any, tp: int) -> Any:
    """Share of hidden states [rows, tokens, width] that a tensor rank has; of numbers or arrays."""
    divides = (np.asarray(rows) % tp == 0) | (np.asarray(tokens) % tp == 0)
    return np.where(divides, 1 / tp, 1.0)[()]
