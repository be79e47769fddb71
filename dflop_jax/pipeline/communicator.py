"""Placing host arrays on a submesh and moving arrays between submeshes."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Sharding


def place(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """A host array, known on every process, as a sharded device array."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def zeros(struct: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of a struct's shape and dtype, placed by its sharding."""
    return place(np.zeros(struct.shape, struct.dtype), struct.sharding)


class Communicator:
    """Moves arrays between submeshes of one process, whatever the shardings on either side."""

    def send(self, array: jax.Array, sharding: Sharding) -> jax.Array:
        """`array` with `sharding`, on other devices if need be; does not wait for it."""
        return jax.device_put(array, sharding)
