"""Moves arrays from the host to a submesh and between submeshes, also between processes.

Every process runs the same program. If an array is on other processes' devices only, a process
holds its shape and sharding, but no shard. The process still takes part in every transfer between
processes, in the same order as all others: JAX matches the two ends of a transfer by counting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

ShardsByDevice = Mapping[jax.Device, jax.Array]


def is_local(mesh: Mesh) -> bool:
    """Return whether this process has a device of the mesh."""
    process_index = jax.process_index()
    return any(d.process_index == process_index for d in mesh.devices.flat)


def assemble_array(struct: jax.ShapeDtypeStruct, shards: list[jax.Array]) -> jax.Array:
    """Return the array of a struct, made from its shards on this process."""
    return jax.make_array_from_single_device_arrays(
        struct.shape, struct.sharding, shards, dtype=struct.dtype
    )


@cache
def remote_array(struct: jax.ShapeDtypeStruct) -> jax.Array:
    """Return the array of a struct whose devices all belong to other processes."""
    return assemble_array(struct, [])


def shard_array(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """Return a sharded device array. `array` must be correct in the shards of this process."""
    # Used for a single process, too: it takes half of the CPU time of `jax.device_put`.
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index], dtype=array.dtype
    )


def zeros(struct: jax.ShapeDtypeStruct) -> jax.Array:
    """Return zeros of a struct's shape, dtype and sharding."""
    return shard_array(np.zeros(struct.shape, struct.dtype), struct.sharding)


def local_shards(array: jax.Array) -> dict[jax.Device, jax.Array]:
    """Return the shards of an array on this process, by device."""
    return {s.device: s.data for s in array.addressable_shards}


@dataclass(frozen=True)
class Route:
    """Copies (from, to) that bring each device of `targets` its shard."""

    targets: tuple[jax.Device, ...]
    # Copies from devices that hold a shard; a target that already holds it copies from itself.
    sent: tuple[tuple[jax.Device, jax.Device], ...]
    # Copies from targets that have received the shard.
    forwarded: tuple[tuple[jax.Device, jax.Device], ...]


def find_route(
    holders: Mapping[Any, Sequence[jax.Device]], wanted: Mapping[jax.Device, Any]
) -> Route:
    """Return the route by which each device of `wanted` gets its shard from one of its `holders`.

    A shard is sent once to the targets, to the first device that wants it. The other targets copy
    it from that device, or from a holder in their own process if there is one. Equally near sources
    share the load.
    """
    sent: list[tuple[jax.Device, jax.Device]] = []
    forwarded: list[tuple[jax.Device, jax.Device]] = []
    delivered: defaultdict[Any, list[jax.Device]] = defaultdict(list)
    for target, key in wanted.items():
        delivered[key] += [target] if target in holders[key] else []
    for i, (target, key) in enumerate(wanted.items()):
        local_holders = [d for d in holders[key] if d.process_index == target.process_index]
        nearest_targets = [d for d in delivered[key] if d.process_index == target.process_index]
        nearest_targets = nearest_targets or ([] if local_holders else delivered[key])
        if target in holders[key]:
            sent.append((target, target))
        elif nearest_targets:
            forwarded.append((nearest_targets[i % len(nearest_targets)], target))
        else:
            local_holders = local_holders or [*holders[key]]
            sent.append((local_holders[i % len(local_holders)], target))
            delivered[key].append(target)
    return Route(tuple(wanted), tuple(sent), tuple(forwarded))


def move_shards(shards: ShardsByDevice, route: Route, shard_struct: Any) -> list[jax.Array]:
    """Copy shards along a route; return those that arrive on this process, in the order of their
    targets. Does not wait.

    `shard_struct` has the shape and dtype of every shard; `shards` are those of this process.
    """
    arrived = _copy_shards(shards, route.sent, shard_struct)
    arrived |= _copy_shards(arrived, route.forwarded, shard_struct)
    return [arrived[t] for t in route.targets if t in arrived]


def _copy_shards(
    shards: ShardsByDevice, pairs: Sequence[tuple[jax.Device, jax.Device]], shard_struct: Any
) -> dict[jax.Device, jax.Array]:
    process_index = jax.process_index()
    arrived = {t: shards[s] for s, t in pairs if s == t and t in shards}
    local = {t: s for s, t in pairs if s != t and s.process_index == t.process_index}
    local = {t: s for t, s in local.items() if t.process_index == process_index}
    if local:
        copies = jax.device_put([shards[s] for s in local.values()], [*local])
        arrived |= zip(local, copies, strict=True)
    # One call per copy: JAX (0.10.2, CPU) may swap the destinations of several copies in one call.
    for s, t in pairs:
        if s.process_index == t.process_index:
            continue
        struct = shard_struct.update(sharding=SingleDeviceSharding(s))
        sent = shards[s] if s in shards else remote_array(struct)
        copy = jax.device_put(sent, SingleDeviceSharding(t))
        if t.process_index == process_index:
            arrived[t] = copy
    return arrived


def send(array: jax.Array, sharding: Sharding, *, donated: bool = False) -> jax.Array:
    """Send `array` to the devices of `sharding`, without waiting; returns the sent array.

    Between processes both shardings must have the same shards, which may be replicated differently;
    `runtime.exchange` handles different data parallelism. `donated`: a later program donates the
    array. JAX (0.10.2, CPU) may then delete it before it has left for another process, so a copy is
    sent.
    """
    route = _route(array.shape, array.sharding, sharding)
    if route is None:
        whole = array.is_fully_addressable and sharding.is_fully_addressable
        assert whole, f"the shards differ: {array.sharding} and {sharding}"
        return jax.device_put(array, sharding)
    shard_struct = jax.ShapeDtypeStruct(sharding.shard_shape(array.shape), array.dtype)
    struct = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    shards = local_shards(array)
    if donated and any(s.process_index != t.process_index for s, t in route.sent):
        shards = {device: shard.copy() for device, shard in shards.items()}
    return assemble_array(struct, move_shards(shards, route, shard_struct))


@cache
def _route(shape: tuple[int, ...], source: Sharding, target: Sharding) -> Route | None:
    """Return the route between two shardings; None if their shards differ."""
    holders: defaultdict[Any, list[jax.Device]] = defaultdict(list)
    for device, index in source.devices_indices_map(shape).items():
        holders[index_key(index)].append(device)
    wanted = {d: index_key(index) for d, index in target.devices_indices_map(shape).items()}
    if not set(wanted.values()) <= set(holders):
        return None
    return find_route(holders, wanted)


def index_key(index: Any) -> tuple[tuple[int | None, int | None], ...]:
    """Return a hashable key of slices, which Python 3.11 does not hash."""
    return tuple((s.start, s.stop) for s in index)
