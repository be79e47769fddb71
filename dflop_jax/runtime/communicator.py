"""Moves arrays from the host to a submesh and between submeshes, of one process or of many.

Every process runs the same program. Of an array on devices of other processes it holds no shard,
only the shape and the sharding. It still takes part in every transfer between processes, in the
same order as all other processes: JAX matches the two ends of a transfer by counting.
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
    """Whether this process has a device of the mesh."""
    process_index = jax.process_index()
    return any(d.process_index == process_index for d in mesh.devices.flat)


def assemble_array(struct: jax.ShapeDtypeStruct, shards: list[jax.Array]) -> jax.Array:
    """The array of a struct from its shards on this process."""
    return jax.make_array_from_single_device_arrays(
        struct.shape, struct.sharding, shards, dtype=struct.dtype
    )


@cache
def remote_array(struct: jax.ShapeDtypeStruct) -> jax.Array:
    """The array of a struct, on devices of other processes only."""
    return assemble_array(struct, [])


def shard_array(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """A sharded device array from a host array, which must be right in this process's shards."""
    # Also of one process alone: half of the processor time of `jax.device_put`.
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index], dtype=array.dtype
    )


def zeros(struct: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros of a struct's shape, dtype and sharding."""
    return shard_array(np.zeros(struct.shape, struct.dtype), struct.sharding)


def local_shards(array: jax.Array) -> dict[jax.Device, jax.Array]:
    """The shards of an array on this process, by device."""
    return {s.device: s.data for s in array.addressable_shards}


@dataclass(frozen=True)
class Route:
    """Copies (from, to) that bring each of `targets` its shard."""

    targets: tuple[jax.Device, ...]
    # From devices that hold it; a target that holds it itself is among them.
    sent: tuple[tuple[jax.Device, jax.Device], ...]
    # From targets that have received it.
    forwarded: tuple[tuple[jax.Device, jax.Device], ...]


def find_route(
    holders: Mapping[Any, Sequence[jax.Device]], wanted: Mapping[jax.Device, Any]
) -> Route:
    """The route by which `wanted` devices get their shards from the `holders` of each.

    A shard crosses to the targets once, to the first device that wants it. The other targets copy
    it from that device, or from a holder in their own process if there is one. Several equally near
    sources share the load.
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
    """Copy shards along a route; returns those that arrive on this process, in the order of their
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
    # One call each: of several in one call JAX (0.10.2, CPU) may swap the destinations.
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
    """`array` with `sharding`, also on other devices; does not wait for it.

    Between processes both sides must have the same shards, which may be replicated differently;
    `runtime.exchange` handles different data parallelism. `donated`: a later program donates the
    array. JAX (0.10.2, CPU) may then delete it before it has left for another process, so a copy is
    sent.
    """
    route = _route(array.shape, array.sharding, sharding)
    if route is None:
        whole = array.is_fully_addressable and sharding.is_fully_addressable
        assert whole, f"pieces differ: {array.sharding} and {sharding}"
        return jax.device_put(array, sharding)
    shard_struct = jax.ShapeDtypeStruct(sharding.shard_shape(array.shape), array.dtype)
    struct = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    shards = local_shards(array)
    if donated and any(s.process_index != t.process_index for s, t in route.sent):
        shards = {device: shard.copy() for device, shard in shards.items()}
    return assemble_array(struct, move_shards(shards, route, shard_struct))


@cache
def _route(shape: tuple[int, ...], source: Sharding, target: Sharding) -> Route | None:
    """None if the shards of the two shardings differ."""
    holders: defaultdict[Any, list[jax.Device]] = defaultdict(list)
    for device, index in source.devices_indices_map(shape).items():
        holders[index_key(index)].append(device)
    wanted = {d: index_key(index) for d, index in target.devices_indices_map(shape).items()}
    if not set(wanted.values()) <= set(holders):
        return None
    return find_route(holders, wanted)


def index_key(index: Any) -> tuple[tuple[int | None, int | None], ...]:
    """A key of slices, which Python 3.11 does not hash."""
    return tuple((s.start, s.stop) for s in index)
