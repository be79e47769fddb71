"""From a folder straight into the shards of a submesh, a piece of a tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from dflop_jax.pipeline.cut import Box, Cut
from dflop_jax.pipeline.held import initial_cuts, initial_structs
from dflop_jax.pipeline.segment import Segment
from dflop_jax.weights.contract import Tensor
from dflop_jax.weights.folder import Folder
from dflop_jax.weights.slices import Range, pieces, read_slice

Tree = Any
WHOLE = Cut(P(), P())
PIECE_BYTES = 32 * 2**20  # of a parameter read at once: twice as many take twice the host memory


def read_segment(
    folder: Folder, segment: Segment, initial: Callable[[], Tree] | None = None
) -> Tree:
    """`held.initial_structs` from a folder; see `read_params`."""
    structs, cuts = initial_structs(segment), initial_cuts(segment)
    return read_params(folder, segment.plan.module, structs, segment.held_rows, initial, cuts)


def read_params(
    folder: Folder,
    module: str,
    structs: Tree,
    rows: Mapping[str, Sequence[int]] = MappingProxyType({}),
    initial: Callable[[], Tree] | None = None,
    cuts: Tree = None,
) -> Tree:
    """Parameters of (a part of) a module, each read into the shards that this process holds.

    The host holds one piece of a tensor at a time, beside what lives in the arrays.

    Args:
      folder: a checkpoint; `check` it first.
      module: name of the module in the model, such as "llm".
      structs: {"entry", "layers", "exit"} or some of them: shapes, dtypes and shardings; layers
        are stacked along the first dim.
      rows: by stacked part, which of its layers `structs` have, in this order; all where it does
        not say.
      cuts: how data ranks share what is in `structs`; None: all as in the folder.
      initial: makes parameters like `structs`, for those that the folder's map leaves out; called
        only if there are such.

    Raises:
      ValueError: the folder has nothing for a parameter and `initial` is not given.
    """
    by_path: dict[tuple[str, tuple[str, ...]], list[Tensor]] = {}
    for tensor in folder.map.tensors:
        if tensor.module == module:
            by_path.setdefault((tensor.part, tensor.path), []).append(tensor)
    given: dict[Any, jax.Array] = {}

    def one(path: Any, struct: jax.ShapeDtypeStruct, cut: Cut = WHOLE) -> jax.Array:
        part, *inner = (key.key for key in path)
        if tensors := by_path.get((part, tuple(inner))):
            stacked = tensors[0].layer is not None
            tensors = [tensors[i] for i in rows.get(part) or range(len(tensors))]
            return _read_leaf(folder, tensors, struct, cut, stacked)
        if initial is not None and not given:
            given.update(jax.tree_util.tree_leaves_with_path(initial()))
        if path not in given:
            raise ValueError(
                f"{folder.path}: nothing for {module}.{part}.{'.'.join(inner)}; give initial "
                "values, or a folder of the whole model"
            )
        return given[path]

    params = jax.tree.map_with_path(one, structs, *([cuts] if cuts else []))
    folder.close()
    return params


def _read_leaf(
    folder: Folder,
    tensors: Sequence[Tensor],
    struct: jax.ShapeDtypeStruct,
    cut: Cut,
    stacked: bool,
) -> jax.Array:
    sharding = struct.sharding
    assert sharding is not None, "read_params needs to know where the parameters go"
    holders: dict[Box, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(struct.shape).items():
        ranges = tuple(s.indices(n)[:2] for s, n in zip(index, struct.shape, strict=True))
        holders.setdefault(ranges, []).append(device)
    shards = [
        shard
        for ranges, devices in holders.items()
        for shard in _read_cut(folder, tensors, struct.dtype, ranges, devices, cut, stacked)
    ]
    return jax.make_array_from_single_device_arrays(
        struct.shape, sharding, shards, dtype=struct.dtype
    )


def _read_cut(
    folder: Folder,
    tensors: Sequence[Tensor],
    dtype: Any,
    ranges: Box,
    devices: Sequence[jax.Device],
    cut: Cut,
    stacked: bool,
) -> list[jax.Array]:
    """One shard of what is held of a parameter, on each of the devices that hold it."""
    if not cut.part:
        return _read_shard(folder, tensors, dtype, ranges, devices, stacked)
    shape = tuple(stop - start for start, stop in ranges)
    shards = [jax.numpy.zeros(shape, dtype, device=device) for device in devices]
    for (_, there), box in cut.boxes(ranges):
        place = np.asarray([*[0] * (len(shape) - 1), there.start], np.int32)
        sizes = (*shape[:-1], there.stop - there.start)
        parts = _read_shard(folder, tensors, dtype, box, devices, stacked)
        shards = [_put(s, p.reshape(sizes), place) for s, p in zip(shards, parts, strict=True)]
    return shards


def _read_shard(
    folder: Folder,
    tensors: Sequence[Tensor],
    dtype: Any,
    ranges: Box,
    devices: Sequence[jax.Device],
    stacked: bool,
) -> list[jax.Array]:
    """A box of a parameter, on each of the devices that hold it."""
    layers, inner = (ranges[0], ranges[1:]) if stacked else ((0, 1), ranges)
    layout = tensors[0].layout
    shape = tuple(stop - start for start, stop in ranges)
    todo = list(pieces(layout, inner, layers, PIECE_BYTES, np.dtype(dtype).itemsize))
    if len(todo) == 1:
        host = _read_piece(folder, tensors, dtype, *todo[0], stacked)
        return [jax.device_put(host, device) for device in devices]
    shards = [jax.numpy.zeros(shape, dtype, device=device) for device in devices]
    for (first, last), index in todo:
        host = _read_piece(folder, tensors, dtype, (first, last), index, stacked)
        lead = ((first, last),) if stacked else ()
        place = np.asarray(
            [a - b for (a, _), (b, _) in zip((*lead, *index), ranges, strict=True)], np.int32
        )
        shards = [_put(s, jax.device_put(host, d), place) for s, d in zip(shards, devices)]
        # Otherwise the pieces would pile up on the host faster than they are taken.
        jax.block_until_ready(shards)
    return shards


def _read_piece(
    folder: Folder,
    tensors: Sequence[Tensor],
    dtype: Any,
    layers: Range,
    index: tuple[Range, ...],
    stacked: bool,
) -> np.ndarray:
    shape = tuple(stop - start for start, stop in index)
    out = np.empty((layers[1] - layers[0], *shape), dtype)
    for i, tensor in enumerate(tensors[slice(*layers)]):
        out[i] = read_slice(tensor.layout, index, partial(_read_parameter, folder, tensor))
    return out if stacked else out[0]


def _read_parameter(folder: Folder, t: Tensor, index: tuple[slice, ...]) -> np.ndarray:
    """A slice of what a parameter is in the file."""
    if t.offset:
        first, *others = index
        index = (slice(first.start + t.offset, first.stop + t.offset), *others)
    return folder.read(t.name, index)


def _update(shard: jax.Array, piece: jax.Array, place: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(shard, piece, tuple(place))


_put = jax.jit(_update, donate_argnums=0)
