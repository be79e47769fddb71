"""How data ranks share a parameter (ZeRO): one rule, for any number of ranks.

The first free dim that the ranks divide is split over the mesh axis "data". If there is none, the
parameter is stored flat: a tensor rank's part of each layer is laid out in C order, padded with
zeros to a multiple of the ranks, and cut into equal shards. The last dim of a flat array counts
data ranks, tensor ranks and elements of a shard; the dims before it have size 1, so that a matrix
keeps its number of dims.

With hybrid sharding, groups of neighbouring ranks share a parameter, and every group holds all of
it. The parameter is then stored flat, too: the array holds one replica per group.
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
    """Return the mesh axes that one entry of a spec names."""
    return () if dim is None else dim if isinstance(dim, tuple) else (dim,)


def data_axis_dim(spec: P) -> int:
    """Return the dim sharded over "data"; -1: none."""
    return next((i for i, dim in enumerate(spec) if "data" in axes_of(dim)), -1)


@dataclass(frozen=True)
class ZeroSpec:
    """How data ranks share a parameter."""

    base_spec: P  # sharding over stages and tensor ranks
    spec: P  # sharding of the stored array; includes data ranks if they share it
    # Shape of a tensor rank's part of one layer (or of an unstacked parameter); () if not flat.
    local_shape: tuple[int, ...] = ()
    dp: int = 1  # data ranks that share a flat parameter
    tp: int = 1  # tensor ranks that split it
    n_replicas: int = 1  # groups of `dp` data ranks, each with a whole parameter

    @property
    def is_split(self) -> bool:
        return data_axis_dim(self.spec) >= 0

    @property
    def local_elements(self) -> int:
        return prod(self.local_shape)

    @property
    def shard_elements(self) -> int:
        """Elements of a data rank's flat shard, including the zeros at its end."""
        return -(-self.local_elements // self.dp)

    @property
    def tensor_dim(self) -> int:
        """The dim of `local_shape` that tensor ranks split; -1: none."""
        axes = list(self.base_spec)[len(self.base_spec) - len(self.local_shape) :]
        return next((i for i, axis in enumerate(axes) if "model" in axes_of(axis)), -1)

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the stored shape of a parameter [layers, if stacked, ...]."""
        if not self.local_shape:
            return shape
        lead = shape[: len(shape) - len(self.local_shape)]
        ones = (1,) * (len(self.local_shape) - 1)
        return (*lead, *ones, self.n_replicas * self.replica_elements)

    @property
    def replica_elements(self) -> int:
        """Elements of the last dim for one replica."""
        return self.dp * self.tp * self.shard_elements

    def to_stored(self, array: Any) -> Any:
        """Return the stored form of a whole parameter or of one layer, by numpy or jax."""
        if not self.local_shape:
            return array
        xp: Any = np if isinstance(array, np.ndarray) else jnp
        return xp.concatenate([self.flatten_local(array, self.tp)] * self.n_replicas, axis=-1)

    def flatten_local(self, array: Any, tp: int = 1) -> Any:
        """Return the stored form, in one replica, of the part of 1 or `tp` tensor ranks."""
        xp: Any = np if isinstance(array, np.ndarray) else jnp
        n_lead, dim = array.ndim - len(self.local_shape), self.tensor_dim
        lead = array.shape[:n_lead]
        if tp > 1:
            array = array.reshape(*lead, *self.local_shape[:dim], tp, *self.local_shape[dim:])
            array = xp.moveaxis(array, n_lead + dim, n_lead)
        rows = array.reshape(*lead, tp, self.local_elements)
        n_zeros = self.dp * self.shard_elements - self.local_elements
        rows = xp.pad(rows, [(0, 0)] * (n_lead + 1) + [(0, n_zeros)])
        by_rank = rows.reshape(*lead, tp, self.dp, self.shard_elements).swapaxes(-3, -2)
        return by_rank.reshape(*lead, *(1,) * (len(self.local_shape) - 1), -1)

    def unflatten_local(self, flat: Any) -> Any:
        """Invert `flatten_local` for one tensor rank."""
        lead = flat.shape[: flat.ndim - len(self.local_shape)]
        elements = flat.reshape(*lead, self.dp * self.shard_elements)[..., : self.local_elements]
        return elements.reshape(*lead, *self.local_shape)

    def full_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Invert `stored_shape`."""
        sizes, split = list(self.local_shape), self.tensor_dim
        if split >= 0:
            sizes[split] *= self.tp
        return (*stored[: len(stored) - len(sizes)], *sizes)

    def boxes(self, shard: Box) -> Iterator[tuple[Any, Box]]:
        """Yield boxes of the parameter that together cover a box of the stored array, without
        zeros; each with the index of the shard at which its elements lie in C order."""
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
            last = min(first + end - position, self.local_elements)
            for box in boxes_of_range(first, last, self.local_shape):
                ranges = list(box)
                if self.tensor_dim >= 0:
                    offset = tensor_rank * self.local_shape[self.tensor_dim]
                    low, high = ranges[self.tensor_dim]
                    ranges[self.tensor_dim] = low + offset, high + offset
                size = prod(high - low for low, high in box)
                index = slice(position - start, position - start + size)
                yield (..., index), (*lead, *ranges)
                position += size
            position = end

    def layer_boxes(self, shard: Box, layers: Sequence[int]) -> Iterator[tuple[Any, Box]]:
        """Yield `boxes` of a stack whose rows are the parameter's layers `layers`."""
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
        """Return whether a box of the stored array belongs to the first replica."""
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
    """Return how `n_replicas` groups of `dp` data ranks share a parameter that `base_spec` shards
    over stages and `tp` tensor ranks; `stacked`: its first dim counts layers."""
    spec = add_data_axis(leaf, base_spec, dp) if n_replicas == 1 else base_spec
    axes = [*base_spec, *[None] * (len(leaf.shape) - len(base_spec))][stacked:]
    degrees = [tp if "model" in axes_of(axis) else 1 for axis in axes]
    local_shape = tuple(n // w for n, w in zip(leaf.shape[stacked:], degrees, strict=True))
    if dp == 1 or spec != base_spec or prod(local_shape) < 2:
        return ZeroSpec(base_spec, spec)
    last_axes = ("data", "model") if prod(degrees) > 1 else "data"
    spec = P(*list(base_spec)[:stacked], *[None] * (len(local_shape) - 1), last_axes)
    return ZeroSpec(base_spec, spec, local_shape, dp, prod(degrees), n_replicas)


def add_data_axis(leaf: jax.ShapeDtypeStruct, spec: P, dp: int) -> P:
    """Return `spec` with "data" on the first free dim that `dp` divides, if there is one."""
    axes = list(spec) + [None] * (len(leaf.shape) - len(spec))
    for i, (size, axis) in enumerate(zip(leaf.shape, axes, strict=True)):
        if axis is None and dp > 1 and size > 0 and size % dp == 0:
            return P(*axes[:i], "data", *axes[i + 1 :])
    return spec


def boxes_of_range(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """Yield boxes of an array that together, in order, are its elements [start, stop)."""
    inner = prod(shape[1:])
    first, last = -(-start // inner) * inner, stop // inner * inner  # whole rows only
    for low, high in pairwise((start, first, last, stop) if first <= last else (start, stop)):
        row = low // inner
        if low % inner or high % inner:
            for box in boxes_of_range(low - row * inner, high - row * inner, shape[1:]):
                yield ((row, row + 1), *box)
        elif low < high:
            yield ((row, high // inner), *((0, n) for n in shape[1:]))
