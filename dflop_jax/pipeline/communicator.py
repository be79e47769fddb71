"""Placing host arrays on a submesh and moving arrays between submeshes, of one process or of many.

Every process runs the same program. Of an array on devices of other processes it holds no piece,
only the shape and the sharding; it still takes part in every transfer between processes, in the
same order as all the others: JAX matches the two ends of a transfer by counting them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

Pieces = Mapping[jax.Device, jax.Array]


def is_local(mesh: Mesh) -> bool:
    """Whether this process has a device of the mesh."""
    here = jax.process_index()
    return any(d.process_index == here for d in mesh.devices.flat)


@cache
def absent(struct: jax.ShapeDtypeStruct) -> jax.Array:
    """The array of a struct, on devices of other processes only."""
    return jax.make_array_from_single_device_arrays(
        struct.shape, struct.sharding, [], dtype=struct.dtype
    )


def place(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """A host array, right in the parts that this process holds, as a sharded device array."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index], dtype=array.dtype
    )


def zeros(struct: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of a struct's shape and dtype, placed by its sharding."""
    return place(np.zeros(struct.shape, struct.dtype), struct.sharding)


def pieces_of(array: jax.Array) -> dict[jax.Device, jax.Array]:
    """What this process holds of an array, by device."""
    return {s.device: s.data for s in array.addressable_shards}


def nearest(holders: Sequence[jax.Device], target: jax.Device, spread: int) -> jax.Device:
    """Which of the holders of a piece gives it to `target`: itself, one of the same process, or
    any, the one at `spread` so that the load is shared."""
    if target in holders:
        return target
    close = [d for d in holders if d.process_index == target.process_index]
    return (close or holders)[spread % len(close or holders)]


def move(
    held: Pieces, sources: Iterable[jax.Device], targets: Iterable[jax.Device], piece: Any
) -> list[jax.Array]:
    """Copy the piece on `sources[i]` to `targets[i]`; the copies that land on this process, in the
    order of their targets. Does not wait.

    `piece` has the shape and dtype of every piece; `held` are those of this process.
    """
    here = jax.process_index()
    routes = list(zip(sources, targets, strict=True))
    cross = [(s, t) for s, t in routes if s.process_index != t.process_index]
    local = [(s, t) for s, t in routes if s.process_index == t.process_index == here]
    arrived = dict(
        zip(
            (t for _, t in local),
            jax.device_put([held[s] for s, _ in local], [t for _, t in local]),
        )
    )
    # One call each: of several in one call JAX (0.10.2, CPU) may swap the destinations.
    for s, t in cross:
        sent = held[s] if s in held else _remote(piece.shape, piece.dtype, s)
        got = jax.device_put(sent, SingleDeviceSharding(t))
        if t.process_index == here:
            arrived[t] = got
    return [arrived[t] for _, t in routes if t in arrived]


@cache
def _remote(shape: tuple[int, ...], dtype: Any, device: jax.Device) -> jax.Array:
    return absent(jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device)))


def send(array: jax.Array, sharding: Sharding) -> jax.Array:
    """`array` with `sharding`, on other devices if need be; does not wait for it.

    Between processes both sides must cut the array into the same pieces, which may be replicated
    differently; `pipeline.exchange` is for different data parallelism.
    """
    if array.is_fully_addressable and sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    shape = array.shape
    sources, targets = _routes(shape, array.sharding, sharding)
    piece = jax.ShapeDtypeStruct(sharding.shard_shape(shape), array.dtype)
    got = move(pieces_of(array), sources, targets, piece)
    return jax.make_array_from_single_device_arrays(shape, sharding, got, dtype=array.dtype)


@cache
def _routes(
    shape: tuple[int, ...], source: Sharding, target: Sharding
) -> tuple[list[jax.Device], list[jax.Device]]:
    holders: dict[Any, list[jax.Device]] = {}
    for device, index in source.devices_indices_map(shape).items():
        holders.setdefault(_key(index), []).append(device)
    wanted = {d: _key(index) for d, index in target.devices_indices_map(shape).items()}
    assert set(wanted.values()) <= set(holders), f"pieces differ: {source} and {target}"
    targets = list(wanted)
    return [nearest(holders[wanted[t]], t, i) for i, t in enumerate(targets)], targets


def _key(index: Any) -> tuple[tuple[int | None, int | None], ...]:
    return tuple((s.start, s.stop) for s in index)
