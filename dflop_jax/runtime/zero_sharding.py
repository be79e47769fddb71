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


def data_axis_dim(spec: P) -> int:
    """The dim sharded over "data"; -1: none."""
    return next((i for i, dim in enumerate(spec) if "data" in axes_of(dim)), -1)


@dataclass(frozen=True)
class ZeroSpec:
    """How a parameter is cut.

    Attributes:
      whole: its sharding over stages and tensor ranks.
      spec: the sharding of what is held, over data ranks too if these share it.
      part: shape of what a tensor rank has of one layer of it, or of a parameter that no layers
        stack; () where it is not held flat.
      data, model: data ranks that share it, and tensor ranks that split it, where it is held flat.
      copies: blocks of so many data ranks, each with all of it.
    """

    base_spec: P
    spec: P
    local_shape: tuple[int, ...] = ()
    dp: int = 1
    tp: int = 1
    n_replicas: int = 1

    @property
    def is_split(self) -> bool:
        return data_axis_dim(self.spec) >= 0

    @property
    def local_elements(self) -> int:
        """Elements of a tensor rank's part."""
        return prod(self.local_shape)

    @property
    def shard_elements(self) -> int:
        """Elements of a data rank's flat piece of that, zeros at its end included."""
        return -(-self.local_elements // self.dp)

    @property
    def tensor_dim(self) -> int:
        """The dim of `part` that tensor ranks split; -1: none."""
        axes = list(self.base_spec)[len(self.base_spec) - len(self.local_shape) :]
        return next((i for i, axis in enumerate(axes) if "model" in axes_of(axis)), -1)

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is held of a parameter [layers, if stacked, ...]."""
        if not self.local_shape:
            return shape
        lead = shape[: len(shape) - len(self.local_shape)]
        return (*lead, *self._ones, self.n_replicas * self.replica_elements)

    @property
    def replica_elements(self) -> int:
        """Elements of the last dim that a block of ranks has."""
        return self.dp * self.tp * self.shard_elements

    @property
    def _ones(self) -> tuple[int, ...]:
        return (1,) * (len(self.local_shape) - 1)

    def to_stored(self, array: Any) -> Any:
        """A whole parameter, or one layer of it, as it is held by all: numpy's or jax's."""
        if not self.local_shape:
            return array
        array_module: Any = np if isinstance(array, np.ndarray) else jnp
        return array_module.concatenate(
            [self.flatten_local(array, self.tp)] * self.n_replicas, axis=-1
        )

    def flatten_local(self, array: Any, tp: int = 1) -> Any:
        """The part [..., *part] of one tensor rank, or those of `model` ranks together, as it is
        held by a block of data ranks."""
        array_module: Any = np if isinstance(array, np.ndarray) else jnp
        n_lead, dim = array.ndim - len(self.local_shape), self.tensor_dim
        lead = array.shape[:n_lead]
        if tp > 1:
            array = array.reshape(*lead, *self.local_shape[:dim], tp, *self.local_shape[dim:])
            array = array_module.moveaxis(array, n_lead + dim, n_lead)
        rows = array.reshape(*lead, tp, self.local_elements)
        n_zeros = self.dp * self.shard_elements - self.local_elements
        rows = array_module.pad(rows, [(0, 0)] * (n_lead + 1) + [(0, n_zeros)])
        by_rank = rows.reshape(*lead, tp, self.dp, self.shard_elements).swapaxes(-3, -2)
        return by_rank.reshape(*lead, *self._ones, self.dp * tp * self.shard_elements)

    def unflatten_local(self, flat: Any) -> Any:
        """The inverse of `flat`."""
        lead = flat.shape[: flat.ndim - len(self.local_shape)]
        elements = flat.reshape(*lead, self.dp * self.shard_elements)[..., : self.local_elements]
        return elements.reshape(*lead, *self.local_shape)

    def full_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The inverse of `held_shape`."""
        sizes = [
            n * (self.tp if i == self.tensor_dim else 1) for i, n in enumerate(self.local_shape)
        ]
        return (*stored[: len(stored) - len(sizes)], *sizes)

    def boxes(self, shard: Box) -> Iterator[tuple[Any, Box]]:
        """Boxes of the parameter that together are a box of what is held, zeros left out; each lies
        in C order at an index of the shard."""
        if not self.local_shape:
            yield (...,), shard
            return
        lead, (start, stop) = shard[: len(shard) - len(self.local_shape)], shard[-1]
        position = start
        while position < stop:
            chunk, skipped = divmod(position, self.shard_elements)
            end = min(stop, (chunk + 1) * self.shard_elements)
            data_rank, tensor_rank = divmod(chunk, self.tp)
            first = data_rank % self.dp * self.shard_elements + skipped
            offsets = [
                tensor_rank * n * (i == self.tensor_dim) for i, n in enumerate(self.local_shape)
            ]
            for box in boxes_of_range(
                first, min(first + end - position, self.local_elements), self.local_shape
            ):
                box_in_param = [(a + i, b + i) for (a, b), i in zip(box, offsets, strict=True)]
                size = prod(b - a for a, b in box)
                yield (
                    (..., slice(position - start, position - start + size)),
                    (*lead, *box_in_param),
                )
                position += size
            position = end

    def layer_boxes(self, shard: Box, layers: Sequence[int]) -> Iterator[tuple[Any, Box]]:
        """`boxes` of a stack whose rows are the parameter's layers of these numbers."""
        (row, stop), *inner = shard
        first = row
        while row < stop:
            end = row + 1
            while end < stop and layers[end] == layers[end - 1] + 1:
                end += 1
            for index, box in self.boxes(((row, end), *inner)):
                layer_range = layers[row], layers[end - 1] + 1
                yield (slice(row - first, end - first), *index), (layer_range, *box[1:])
            row = end

    def is_first_replica(self, shard: Box) -> bool:
        """Whether a box of what is held is of the first block of ranks."""
        return not self.local_shape or shard[-1][0] < self.replica_elements


def make_zero_spec(
    leaf: jax.ShapeDtypeStruct,
    base_spec: P,
    *,
    stacked: bool,
    dp: int,
    tp: int,
    n_replicas: int = 1,
) -> ZeroSpec:
    """How `data` ranks cut a parameter that is sharded by `whole` over stages and `model` tensor
    ranks, where as many blocks of ranks as there are `copies` each have it. `stacked`: whether its
    first dim is that of layers."""
    spec = add_data_axis(leaf, base_spec, dp) if n_replicas == 1 else base_spec
    axes = [*base_spec, *[None] * (len(leaf.shape) - len(base_spec))][stacked:]
    degrees = [tp if "model" in axes_of(axis) else 1 for axis in axes]
    local_shape = tuple(n // w for n, w in zip(leaf.shape[stacked:], degrees, strict=True))
    if dp == 1 or spec != base_spec or prod(local_shape) < 2:
        return ZeroSpec(base_spec, spec)
    last_axes = ("data", "model") if prod(degrees) > 1 else "data"
    lead = list(base_spec)[:stacked]
    return ZeroSpec(
        base_spec,
        P(*lead, *[None] * (len(local_shape) - 1), last_axes),
        local_shape,
        dp,
        prod(degrees),
        n_replicas,
    )


def add_data_axis(leaf: jax.ShapeDtypeStruct, spec: P, dp: int) -> P:
    """`spec` with "data" on the first free dim that `ways` divides; as it is if there is none."""
    axes = list(spec) + [None] * (len(leaf.shape) - len(spec))
    for i, (size, axis) in enumerate(zip(leaf.shape, axes, strict=True)):
        if axis is None and dp > 1 and size > 0 and size % dp == 0:
            return P(*axes[:i], "data", *axes[i + 1 :])
    return spec


def boxes_of_range(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Boxes of an array of a shape that together, in order, are its elements [start, stop)."""
    inner = prod(shape[1:])
    # What lies in rows that are there as a whole.
    first, last = -(-start // inner) * inner, stop // inner * inner
    for low, high in pairwise((start, first, last, stop) if first <= last else (start, stop)):
        row = low // inner
        if low % inner or high % inner:
            for box in boxes_of_range(low - row * inner, high - row * inner, shape[1:]):
                yield ((row, row + 1), *box)
        elif low < high:
            yield ((row, high // inner), *((0, n) for n in shape[1:]))
