"""How a parameter is cut over data ranks (ZeRO): one rule, for any number of ranks.

The first free dim that the ranks divide is split over the mesh axis "data". Where there is none,
the parameter is held flat: what a tensor rank has of it, of each layer apart, is laid out in C
order, padded with zeros to a multiple of the ranks, and cut into equal pieces. The last dim of a
flat array counts data ranks, tensor ranks and elements of a piece; the dims before it are of size
1, so that a matrix keeps the number of its dims.

Where neighbouring ranks share a parameter among themselves, and every such block of ranks has all
of it (hybrid sharding), it is held flat too: the array then holds it once for each block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

Box = tuple[tuple[int, int], ...]  # [start, stop) by dim


def axes_of(dim: Any) -> tuple[str, ...]:
    """Mesh axes that one entry of a spec names."""
    return () if dim is None else dim if isinstance(dim, tuple) else (dim,)


def data_dim(spec: P) -> int:
    """The dim sharded over "data"; -1: none."""
    return next((i for i, dim in enumerate(spec) if "data" in axes_of(dim)), -1)


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut.

    Attributes:
      whole: its sharding over stages and tensor ranks.
      spec: the sharding of what is held, over data ranks too if these share it.
      part: shape of what a tensor rank has of one layer of it, or of a parameter that no layers
        stack; () where it is not held flat.
      data, model: data ranks that share it, and tensor ranks that split it, where it is held flat.
      copies: blocks of so many data ranks, each with all of it.
    """

    whole: P
    spec: P
    part: tuple[int, ...] = ()
    data: int = 1
    model: int = 1
    copies: int = 1

    @property
    def is_split(self) -> bool:
        return data_dim(self.spec) >= 0

    @property
    def n_elements(self) -> int:
        """Elements of a tensor rank's part."""
        return prod(self.part)

    @property
    def piece(self) -> int:
        """Elements of a data rank's flat piece of that, zeros at its end included."""
        return -(-self.n_elements // self.data)

    @property
    def tensor_dim(self) -> int:
        """The dim of `part` that tensor ranks split; -1: none."""
        axes = list(self.whole)[len(self.whole) - len(self.part) :]
        return next((i for i, axis in enumerate(axes) if "model" in axes_of(axis)), -1)

    def held_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is held of a parameter [layers, if stacked, ...]."""
        if not self.part:
            return shape
        lead = shape[: len(shape) - len(self.part)]
        return (*lead, *self._ones, self.copies * self.length)

    @property
    def length(self) -> int:
        """Elements of the last dim that a block of ranks has."""
        return self.data * self.model * self.piece

    @property
    def _ones(self) -> tuple[int, ...]:
        return (1,) * (len(self.part) - 1)

    def hold(self, array: Any) -> Any:
        """A whole parameter, or one layer of it, as it is held by all: numpy's or jax's."""
        if not self.part:
            return array
        xp: Any = np if isinstance(array, np.ndarray) else jnp
        return xp.concatenate([self.flat(array, self.model)] * self.copies, axis=-1)

    def flat(self, array: Any, model: int = 1) -> Any:
        """The part [..., *part] of one tensor rank, or those of `model` ranks together, as it is
        held by a block of data ranks."""
        xp: Any = np if isinstance(array, np.ndarray) else jnp
        n_lead, dim = array.ndim - len(self.part), self.tensor_dim
        lead = array.shape[:n_lead]
        if model > 1:
            array = array.reshape(*lead, *self.part[:dim], model, *self.part[dim:])
            array = xp.moveaxis(array, n_lead + dim, n_lead)
        rows = array.reshape(*lead, model, self.n_elements)
        n_zeros = self.data * self.piece - self.n_elements
        rows = xp.pad(rows, [(0, 0)] * (n_lead + 1) + [(0, n_zeros)])
        pieces = rows.reshape(*lead, model, self.data, self.piece).swapaxes(-3, -2)
        return pieces.reshape(*lead, *self._ones, self.data * model * self.piece)

    def part_of(self, flat: Any) -> Any:
        """The inverse of `flat`."""
        lead = flat.shape[: flat.ndim - len(self.part)]
        elements = flat.reshape(*lead, self.data * self.piece)[..., : self.n_elements]
        return elements.reshape(*lead, *self.part)

    def shape_of(self, held: tuple[int, ...]) -> tuple[int, ...]:
        """The inverse of `held_shape`."""
        sizes = [n * (self.model if i == self.tensor_dim else 1) for i, n in enumerate(self.part)]
        return (*held[: len(held) - len(sizes)], *sizes)

    def boxes(self, shard: Box) -> Iterator[tuple[Any, Box]]:
        """Boxes of the parameter that together are a box of what is held, zeros left out; each lies
        in C order at an index of the shard."""
        if not self.part:
            yield (...,), shard
            return
        lead, (start, stop) = shard[: len(shard) - len(self.part)], shard[-1]
        place = start
        while place < stop:
            chunk, skipped = divmod(place, self.piece)
            end = min(stop, (chunk + 1) * self.piece)
            data, model = divmod(chunk, self.model)
            first = data % self.data * self.piece + skipped
            begins = [model * n * (i == self.tensor_dim) for i, n in enumerate(self.part)]
            for box in flat_boxes(first, min(first + end - place, self.n_elements), self.part):
                there = [(a + i, b + i) for (a, b), i in zip(box, begins, strict=True)]
                size = prod(b - a for a, b in box)
                yield (..., slice(place - start, place - start + size)), (*lead, *there)
                place += size
            place = end

    def layer_boxes(self, shard: Box, layers: Sequence[int]) -> Iterator[tuple[Any, Box]]:
        """`boxes` of a stack whose rows are the parameter's layers of these numbers."""
        (row, stop), *inner = shard
        first = row
        while row < stop:
            end = row + 1
            while end < stop and layers[end] == layers[end - 1] + 1:
                end += 1
            for place, box in self.boxes(((row, end), *inner)):
                here = layers[row], layers[end - 1] + 1
                yield (slice(row - first, end - first), *place), (here, *box[1:])
            row = end

    def is_first_copy(self, shard: Box) -> bool:
        """Whether a box of what is held is of the first block of ranks."""
        return not self.part or shard[-1][0] < self.length


def cut_over(
    leaf: jax.ShapeDtypeStruct, whole: P, *, stacked: bool, data: int, model: int, copies: int = 1
) -> Cut:
    """How `data` ranks cut a parameter that is sharded by `whole` over stages and `model` tensor
    ranks, where as many blocks of ranks as there are `copies` each have it. `stacked`: whether its
    first dim is that of layers."""
    spec = split_spec(leaf, whole, data) if copies == 1 else whole
    axes = [*whole, *[None] * (len(leaf.shape) - len(whole))][stacked:]
    ways = [model if "model" in axes_of(axis) else 1 for axis in axes]
    part = tuple(n // w for n, w in zip(leaf.shape[stacked:], ways, strict=True))
    if data == 1 or spec != whole or prod(part) < 2:
        return Cut(whole, spec)
    last = ("data", "model") if prod(ways) > 1 else "data"
    lead = list(whole)[:stacked]
    return Cut(whole, P(*lead, *[None] * (len(part) - 1), last), part, data, prod(ways), copies)


def split_spec(leaf: jax.ShapeDtypeStruct, spec: P, ways: int) -> P:
    """`spec` with "data" on the first free dim that `ways` divides; as it is if there is none."""
    axes = list(spec) + [None] * (len(leaf.shape) - len(spec))
    for i, (size, axis) in enumerate(zip(leaf.shape, axes, strict=True)):
        if axis is None and ways > 1 and size > 0 and size % ways == 0:
            return P(*axes[:i], "data", *axes[i + 1 :])
    return spec


def flat_boxes(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Boxes of an array of a shape that together, in order, are its elements [start, stop)."""
    inner = prod(shape[1:])
    # What lies in rows that are there as a whole.
    first, last = -(-start // inner) * inner, stop // inner * inner
    for low, high in pairwise((start, first, last, stop) if first <= last else (start, stop)):
        row = low // inner
        if low % inner or high % inner:
            for box in flat_boxes(low - row * inner, high - row * inner, shape[1:]):
                yield ((row, row + 1), *box)
        elif low < high:
            yield ((row, high // inner), *((0, n) for n in shape[1:]))
