"""Moves the train state of one executor to another one, whose layout may differ, in memory.

Each shard of the target is composed of boxes of source shards (`state_arrays`). Arrays move one by
one, and the source's leaves are released with each, so that a device holds about one state and one
array more. Parameters that are copies of masters or of tied parameters are made anew, and so are
gradients, which are zeros between steps.

Every process plans the same move, and runs its transfers in the same order (`communicator`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dflop_jax.runtime.communicator import (
    Route,
    assemble_array,
    find_route,
    index_key,
    local_shards,
    move_shards,
)
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.state_arrays import (
    StateArray,
    TreeKey,
    put_leaves,
    saved_leaves,
    split_masters,
    state_arrays,
)
from dflop_jax.runtime.step import TrainState
from dflop_jax.runtime.zero_sharding import Box


@dataclass(frozen=True)
class Region:
    """Elements of a shard: the part `inner` of those in `span`, reshaped to `box_shape`."""

    span: Box
    box_shape: tuple[int, ...]
    inner: Box

    @property
    def shape(self) -> tuple[int, ...]:
        return _sizes(self.inner)


@dataclass(frozen=True)
class Overlap:
    """A box of an array that a source shard and a target shard have in common."""

    holders: Mapping[jax.Device, tuple[int, Region]]  # (number of the source leaf, where in it)
    route: Route
    target_region: Region  # in the target shard


@dataclass(frozen=True)
class ShardMove:
    """A shard that some devices of the target need, and the source's boxes that it consists of."""

    devices: tuple[jax.Device, ...]
    shape: tuple[int, ...]
    overlaps: tuple[Overlap, ...]

    @property
    def is_one_overlap(self) -> bool:
        """Whether one box of the source is the shard, so that nothing is composed."""
        return [p.target_region.shape for p in self.overlaps] == [self.shape]


@dataclass(frozen=True)
class ArrayMove:
    """How an array gets from its source leaves to its target leaves."""

    sources: tuple[StateArray, ...]
    targets: Mapping[StateArray, tuple[ShardMove, ...]]

    @cached_property
    def copied_bytes(self) -> tuple[Counter[jax.Device], Counter[jax.Device]]:
        """Bytes by device (that arrive from other devices, of other copies made meanwhile)."""
        arriving, working = Counter[jax.Device](), Counter[jax.Device]()
        for target, shards in self.targets.items():
            itemsize = target.struct.dtype.itemsize
            for p in (p for s in shards for p in s.overlaps):
                n_bytes = prod(p.target_region.shape) * itemsize
                hops = (*p.route.sent, *p.route.forwarded)
                arriving.update(Counter({t: n_bytes for s, t in hops if s != t}))
                cuts = {s for s, _ in p.route.sent if not self._is_leaf_shard(p, s)}
                working.update(Counter(dict.fromkeys(cuts, n_bytes)))
            for shard in (s for s in shards if not s.is_one_overlap):
                # The shard, and a copy of one of its boxes at a time.
                n_bytes = 2 * prod(shard.shape) * itemsize
                working.update(Counter(dict.fromkeys(shard.devices, n_bytes)))
        return arriving, working

    def _is_leaf_shard(self, overlap: Overlap, device: jax.Device) -> bool:
        leaf, region = overlap.holders[device]
        return region.shape == _shard_shape(self.sources[leaf])


@dataclass(frozen=True)
class StateMove:
    """A planned move; see `plan_move`."""

    arrays: tuple[ArrayMove, ...]

    @cached_property
    def sent_bytes(self) -> int:
        """Bytes that move from one device to another."""
        return sum(n for a in self.arrays for n in a.copied_bytes[0].values())

    @cached_property
    def peak_bytes(self) -> int:
        """Bytes on the fullest device at the fullest moment of the move."""
        live = sum((_leaf_bytes(a.sources) for a in self.arrays), Counter[jax.Device]())
        peak = Counter(live)
        for a in self.arrays:
            peak |= sum(a.copied_bytes, live)
            live = live - _leaf_bytes(a.sources) + _leaf_bytes(a.targets)
        return max(peak.values(), default=0)


def plan_move(source: Executor, target: Executor) -> StateMove:
    """Plan how to move the state; a pure function of the two layouts. Both executors train the same
    parts of the same model with the same optimizer."""
    by_name: tuple[defaultdict[str, list[StateArray]], ...]
    by_name = defaultdict(list), defaultdict(list)
    for arrays, ex in zip(by_name, (source, target), strict=True):
        for a in state_arrays(ex):
            arrays[a.name].append(a)
    sources, targets = by_name
    assert sources.keys() == targets.keys(), sources.keys() ^ targets.keys()
    planned: dict[tuple[StateArray, ...], tuple[ShardMove, ...]] = {}

    def shard_moves(name: str, target: StateArray) -> tuple[ShardMove, ...]:
        # Parameters and their moments move alike.
        key = tuple(
            replace(a, name="", kind="", leaf=0, saves=True) for a in (target, *sources[name])
        )
        if key not in planned:
            planned[key] = _plan_array(key[1:], target)
        return planned[key]

    return StateMove(
        tuple(
            ArrayMove(tuple(sources[name]), {t: shard_moves(name, t) for t in of_name})
            for name, of_name in targets.items()
        )
    )


def _plan_array(sources: Iterable[StateArray], target: StateArray) -> tuple[ShardMove, ...]:
    source_regions: defaultdict[Box, dict[jax.Device, tuple[int, Region]]] = defaultdict(dict)
    for leaf, a in enumerate(sources):
        for devices, regions in _shards(a):
            for box, region in regions:
                for device in devices:
                    source_regions[box].setdefault(device, (leaf, region))
    boxes = [*source_regions]
    bounds = np.array(boxes, dtype=np.int64).reshape(len(boxes), -1, 2)
    moves = []
    for devices, regions in _shards(target):
        overlaps = []
        for box, region in regions:
            target_bounds = np.array(box, dtype=np.int64).reshape(-1, 2)
            low = np.maximum(bounds[..., 0], target_bounds[:, 0])
            high = np.minimum(bounds[..., 1], target_bounds[:, 1])
            for i in np.flatnonzero((low < high).all(axis=-1)):
                shared_box = tuple(zip(low[i].tolist(), high[i].tolist(), strict=True))
                holders = {
                    d: (leaf, replace(r, inner=_relative(shared_box, boxes[i])))
                    for d, (leaf, r) in source_regions[boxes[i]].items()
                }
                route = find_route({0: [*holders]}, dict.fromkeys(devices, 0))
                target_region = replace(region, inner=_relative(shared_box, box))
                overlaps.append(Overlap(holders, route, target_region))
        moves.append(ShardMove(devices, _shard_shape(target), tuple(overlaps)))
    return tuple(moves)


def _shards(a: StateArray) -> Iterator[tuple[tuple[jax.Device, ...], list[tuple[Box, Region]]]]:
    """Yield the different shards of a leaf: their devices, and the array's boxes in them."""
    devices: defaultdict[Any, list[jax.Device]] = defaultdict(list)
    indices = a.struct.sharding.devices_indices_map(a.struct.shape)
    for device, index in indices.items():
        devices[index_key(index)].append(device)
    shape = _shard_shape(a)
    for of_shard in devices.values():
        regions = []
        for position, box in a.boxes(indices[of_shard[0]]):
            box_shape = _sizes(box)
            inner = tuple((0, n) for n in box_shape)
            regions.append((box, Region(_span(position, shape), box_shape, inner)))
        yield tuple(of_shard), regions


def _span(position: tuple[Any, ...], shape: tuple[int, ...]) -> Box:
    """Return the range in each dim of an index that has an ellipsis."""
    i = position.index(...)
    n_between = len(shape) - (len(position) - 1)
    slices = (*position[:i], *[slice(None)] * n_between, *position[i + 1 :])
    return tuple(s.indices(n)[:2] for s, n in zip(slices, shape, strict=True))


def _relative(box: Box, outer: Box) -> Box:
    return tuple((low - first, high - first) for (low, high), (first, _) in zip(box, outer))


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(high - low for low, high in box)


def _shard_shape(a: StateArray) -> tuple[int, ...]:
    return tuple(a.struct.sharding.shard_shape(a.struct.shape))


def _leaf_bytes(arrays: Iterable[StateArray]) -> Counter[jax.Device]:
    """Return the bytes of leaves on each device."""
    n_bytes = Counter[jax.Device]()
    for a in arrays:
        shard_bytes = prod(_shard_shape(a)) * a.struct.dtype.itemsize
        n_bytes.update(dict.fromkeys(a.struct.sharding.device_set, shard_bytes))
    return n_bytes


def move_state(
    move: StateMove, source: Executor, target: Executor, sync: Callable[[], None] = lambda: None
) -> None:
    """Move the state between steps; the source is left without one. Runs on all processes together;
    `sync` waits for the others."""
    source_leaves: dict[TreeKey, list[Any]] = saved_leaves(source)
    old = source.state
    for trees in (old.params, old.masters, old.opt_state, old.grads, old.shared):
        trees.clear()  # also for those who hold the record
    source.state = TrainState()
    target_leaves: defaultdict[TreeKey, dict[int, jax.Array]] = defaultdict(dict)
    sync()  # nobody runs a step
    for a in move.arrays:
        shards = [local_shards(source_leaves[s.tree][s.leaf]) for s in a.sources]
        for target_array, shard_moves in a.targets.items():
            array = _move_array(target_array.struct, shards, shard_moves)
            target_leaves[target_array.tree][target_array.leaf] = array
        del shards
        for s in a.sources:
            source_leaves[s.tree][s.leaf] = None
        jax.block_until_ready([target_leaves[t.tree][t.leaf] for t in a.targets])
    sync()  # all have received theirs: a source's buffer may be a target's, which steps donate
    target.init_for_restore()
    for (segment, kind), by_leaf in target_leaves.items():
        put_leaves(target, segment, kind, [by_leaf[i] for i in range(len(by_leaf))])
    split_masters(target)


def _move_array(
    struct: jax.ShapeDtypeStruct,
    shards: list[dict[jax.Device, jax.Array]],
    shard_moves: tuple[ShardMove, ...],
) -> jax.Array:
    """Return a target leaf, composed of the source leaves' local shards."""
    process_index = jax.process_index()
    arrived: dict[jax.Device, jax.Array] = {}
    for move in shard_moves:
        local = [d for d in move.devices if d.process_index == process_index]
        boxes: dict[jax.Device, list[tuple[Region, jax.Array]]] = {d: [] for d in local}
        for overlap in move.overlaps:
            cuts = {}
            for device in dict.fromkeys(s for s, _ in overlap.route.sent):
                if device.process_index == process_index:
                    leaf, region = overlap.holders[device]
                    cuts[device] = _cut(shards[leaf][device], region)
            box_struct = jax.ShapeDtypeStruct(overlap.target_region.shape, struct.dtype)
            copies = move_shards(cuts, overlap.route, box_struct)
            for device, copy in zip(local, copies, strict=True):
                boxes[device].append((overlap.target_region, copy))
        for device in local:
            arrived[device] = _compose(move, struct.dtype, device, boxes[device])
    in_order = [arrived[d] for d in struct.sharding.addressable_devices_indices_map(struct.shape)]
    return assemble_array(struct, in_order)


def _is_host(device: jax.Device) -> bool:
    """Return whether numpy reads and writes the device's arrays, which compiles nothing."""
    return device.platform == "cpu"


def _cut(shard: jax.Array, region: Region) -> jax.Array:
    """Return a part of a shard, on its device."""
    if region.shape == shard.shape:
        return shard
    (device,) = shard.devices()
    if _is_host(device):
        box = np.asarray(shard)[_slices(region.span)].reshape(region.box_shape)
        return jax.device_put(np.array(box[_slices(region.inner)], order="C"), device)
    starts = _starts(region)
    return _cut_program(shard, *starts, sizes=(_sizes(region.span), region.box_shape, region.shape))


@partial(jax.jit, static_argnames="sizes")
def _cut_program(shard: Any, span: Any, inner: Any, *, sizes: Any) -> Any:
    span_sizes, box_shape, shape = sizes
    box = lax.dynamic_slice(shard, span, span_sizes).reshape(box_shape)
    return lax.dynamic_slice(box, inner, shape)


def _compose(
    move: ShardMove, dtype: Any, device: jax.Device, boxes: list[tuple[Region, jax.Array]]
) -> jax.Array:
    """Return a shard made of boxes on its device, with zeros elsewhere."""
    if move.is_one_overlap:
        ((_, array),) = boxes
        return array
    if _is_host(device):
        host = np.zeros(move.shape, dtype)
        for region, array in boxes:
            span = host[_slices(region.span)]
            box = span.reshape(region.box_shape)
            box[_slices(region.inner)] = array
            if not np.may_share_memory(box, host):
                span[...] = box.reshape(span.shape)
        return jax.device_put(host, device)
    shard = jnp.zeros(move.shape, dtype, device=device)
    for region, array in boxes:
        sizes = _sizes(region.span), region.box_shape
        shard = _place_program(shard, array, *_starts(region), sizes=sizes)
    return shard


@partial(jax.jit, static_argnames="sizes", donate_argnums=0)
def _place_program(shard: Any, array: Any, span: Any, inner: Any, *, sizes: Any) -> Any:
    span_sizes, box_shape = sizes
    box = lax.dynamic_slice(shard, span, span_sizes).reshape(box_shape)
    box = lax.dynamic_update_slice(box, array, inner)
    return lax.dynamic_update_slice(shard, box.reshape(span_sizes), span)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*ends) for ends in box)


def _starts(region: Region) -> tuple[list[Any], list[Any]]:
    # Traced, so that a program serves all starts.
    return [np.int32(low) for low, _ in region.span], [np.int32(low) for low, _ in region.inner]
