"""Read a checkpoint folder straight into the shards of a submesh, in chunks of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from dflop_jax.runtime.parameter_layout import initial_structs, initial_zero_specs
from dflop_jax.runtime.segment import Segment
from dflop_jax.runtime.zero_sharding import Box, ZeroSpec
from dflop_jax.weights.contract import Reshaping, Tensor
from dflop_jax.weights.folder import Folder

Tree = Any
Range = tuple[int, int]
Reader = Callable[[tuple[slice, ...]], np.ndarray]
CHUNK_BYTES = 32 * 2**20  # of a parameter per read; host memory grows in proportion


def read_segment(
    folder: Folder, segment: Segment, initial: Callable[[], Tree] | None = None
) -> Tree:
    """Read a segment's parameters (`initial_structs`) from a folder; see `read_params`."""
    structs, cuts = initial_structs(segment), initial_zero_specs(segment)
    return read_params(folder, segment.plan.module, structs, segment.layer_rows, initial, cuts)


def read_params(
    folder: Folder,
    module: str,
    structs: Tree,
    rows: Mapping[str, Sequence[int]] = MappingProxyType({}),
    initial: Callable[[], Tree] | None = None,
    zero_specs: Tree = None,
) -> Tree:
    """Read parameters of a module into the shards of this process. The host holds one chunk of a
    tensor at a time.

    Args:
      folder: a checkpoint; call its `check` first.
      structs: shapes, dtypes and shardings by part; layers are stacked along the first dim.
      rows: by stacked part, the layers that `structs` have, in order; all if it is not there.
      initial: makes parameters like `structs`, for those that the folder's map leaves out.
      zero_specs: ZeRO sharding of `structs` over data ranks; None: no ZeRO sharding.

    Raises:
      ValueError: the folder has no tensor for a parameter and `initial` is None.
    """
    by_path: dict[tuple[str, tuple[str, ...]], list[Tensor]] = {}
    for tensor in folder.map.tensors:
        if tensor.module == module:
            by_path.setdefault((tensor.part, tensor.path), []).append(tensor)
    initial_leaves: dict[Any, jax.Array] = {}

    def read(path: Any, struct: jax.ShapeDtypeStruct, spec: ZeroSpec | None = None) -> jax.Array:
        part, *inner = (key.key for key in path)
        if tensors := by_path.get((part, tuple(inner))):
            stacked = tensors[0].layer is not None
            tensors = [tensors[i] for i in rows.get(part) or range(len(tensors))]
            leaf = _ParameterReader(folder, tensors, np.dtype(struct.dtype), stacked)
            assert struct.sharding is not None, "read_params needs the sharding of parameters"
            shards = leaf.shards(spec, struct.shape, struct.sharding)
            return jax.make_array_from_single_device_arrays(
                struct.shape, struct.sharding, shards, dtype=struct.dtype
            )
        if initial is not None and not initial_leaves:
            initial_leaves.update(jax.tree_util.tree_leaves_with_path(initial()))
        if path not in initial_leaves:
            raise ValueError(
                f"{folder.path}: no tensor for {module}.{part}.{'.'.join(inner)}; give initial "
                "values, or a folder of the whole model"
            )
        return initial_leaves[path]

    return jax.tree.map_with_path(read, structs, *([zero_specs] if zero_specs else []))


@dataclass(frozen=True)
class _ParameterReader:
    """Reads a parameter from its checkpoint tensors: one per layer if it is `stacked`."""

    folder: Folder
    tensors: Sequence[Tensor]
    dtype: np.dtype
    stacked: bool

    def shards(
        self, cut: ZeroSpec | None, shape: tuple[int, ...], sharding: jax.sharding.Sharding
    ) -> list[jax.Array]:
        """Return the shards of this process."""
        holders: dict[Box, list[jax.Device]] = {}
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            assert index is not None
            ranges = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
            holders.setdefault(ranges, []).append(device)
        read = partial(self._read_cut_box, cut) if cut and cut.local_shape else self._read_box
        return [shard for ranges, devices in holders.items() for shard in read(ranges, devices)]

    def _read_cut_box(
        self, cut: ZeroSpec, ranges: Box, devices: Sequence[jax.Device]
    ) -> list[jax.Array]:
        """Return one ZeRO shard, on each of the devices that hold it."""
        shards = self._empty(ranges, devices)
        for (_, target), box in cut.boxes(ranges):
            offsets = np.asarray([*[0] * (len(ranges) - 1), target.start], np.int32)
            sizes = (*shards[0].shape[:-1], target.stop - target.start)
            parts = zip(shards, self._read_box(box, devices), strict=True)
            shards = [_update_shard(shard, p.reshape(sizes), offsets) for shard, p in parts]
        return shards

    def _read_box(self, ranges: Box, devices: Sequence[jax.Device]) -> list[jax.Array]:
        """Return a box of the parameter, on each of the devices that hold it."""
        layers, inner = (ranges[0], ranges[1:]) if self.stacked else ((0, 1), ranges)
        chunks = list(
            split_chunks(self.tensors[0].layout, inner, layers, CHUNK_BYTES, self.dtype.itemsize)
        )
        if len(chunks) == 1:
            host = self._read_chunk(*chunks[0])
            return [jax.device_put(host, device) for device in devices]
        shards = self._empty(ranges, devices)
        for among, index in chunks:
            host = self._read_chunk(among, index)
            box = (among, *index) if self.stacked else index
            starts = [a - b for (a, _), (b, _) in zip(box, ranges, strict=True)]
            parts = zip(shards, jax.device_put([host] * len(devices), [*devices]), strict=True)
            shards = [_update_shard(shard, p, np.asarray(starts, np.int32)) for shard, p in parts]
            # Otherwise chunks would pile up on the host faster than devices receive them.
            jax.block_until_ready(shards)
        return shards

    def _empty(self, ranges: Box, devices: Sequence[jax.Device]) -> list[jax.Array]:
        shape = tuple(stop - start for start, stop in ranges)
        return [jax.numpy.zeros(shape, self.dtype, device=device) for device in devices]

    def _read_chunk(self, layers: Range, index: tuple[Range, ...]) -> np.ndarray:
        arrays = [
            read_slice(t.layout, index, partial(_read_parameter, self.folder, t))
            for t in self.tensors[slice(*layers)]
        ]
        return (np.stack(arrays) if self.stacked else arrays[0]).astype(self.dtype, copy=False)


def _read_parameter(folder: Folder, t: Tensor, index: tuple[slice, ...]) -> np.ndarray:
    """Read a slice of a parameter, in the file's layout."""
    if t.offset:
        first, *others = index
        index = (slice(first.start + t.offset, first.stop + t.offset), *others)
    return folder.read(t.name, index)


@partial(jax.jit, donate_argnums=0)
def _update_shard(shard: jax.Array, update: jax.Array, offsets: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(shard, update, tuple(offsets))


def read_slice(layout: Reshaping, index: tuple[Range, ...], read: Reader) -> np.ndarray:
    """Return a slice of a parameter; `index` has (start, stop) for each dim. Call `read` once, for
    the smallest slice of the file's array that contains it."""
    joined = len(layout.shape) != len(layout.order)
    wanted = [(0, size) for size in layout.split]
    if not joined:
        for dim, split_dim in enumerate(layout.order):
            wanted[split_dim] = index[dim]
    slices, sizes, cuts, first_dim = [], [], [], 0
    for dims in layout.splits:
        ranges = wanted[first_dim : first_dim + len(dims)]
        first_dim += len(dims)
        if not dims:
            slices.append(slice(0, 1))
            continue
        (start, stop), rest = ranges[0], math.prod(dims[1:])
        slices.append(slice(start * rest, stop * rest))
        sizes += [stop - start, *dims[1:]]
        cuts += [slice(None), *(slice(*r) for r in ranges[1:])]
    array = read(tuple(slices)).reshape(sizes)[tuple(cuts)].transpose(layout.order)
    if joined:
        array = array.reshape(layout.shape)[tuple(slice(*r) for r in index)]
    return array


def split_chunks(
    layout: Reshaping, index: tuple[Range, ...], layers: Range, limit_bytes: int, itemsize: int
) -> Iterator[tuple[Range, tuple[Range, ...]]]:
    """Yield (layers, index) of chunks of at most about `limit_bytes` that cover all `layers` and
    `index`: several small layers, or rows of a large one along the file's outermost dim."""
    each = math.prod(stop - start for start, stop in index) * itemsize
    step = max(1, limit_bytes // max(each, 1))
    if each <= limit_bytes or len(layout.shape) != len(layout.order):
        for start in range(*layers, step):
            yield (start, min(start + step, layers[1])), index
        return
    dim = layout.order.index(0)
    start, stop = index[dim]
    rows = max(1, limit_bytes * (stop - start) // each)
    for layer in range(*layers):
        for row in range(start, stop, rows):
            part = (row, min(row + rows, stop))
            yield (layer, layer + 1), (*index[:dim], part, *index[dim + 1 :])
