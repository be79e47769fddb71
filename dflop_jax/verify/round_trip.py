"""From a folder into the shards of a plan, and out again: is every bit as it was?

One segment lies in memory at a time, so that a folder may be larger than the memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import numpy as np
from safetensors import safe_open

from dflop_jax.contract import Module, MultimodalModel, edges_of, split_dim
from dflop_jax.pipeline.layout import make_segments
from dflop_jax.records import Bucket, Layout, Plan, SegmentPlan, Shape, SubmeshPlan
from dflop_jax.verify.results import TensorGroup
from dflop_jax.weights import Folder, ModuleParams, read_segment, write_segment
from dflop_jax.weights.contract import Tensor
from dflop_jax.weights.folder import DTYPES

SEGMENT_BYTES = 2 * 10**9  # of a segment's shards, about
COMPARED_BYTES = 32 * 2**20  # of a tensor at a time
WAYS = 2  # into which a tensor is split
TOKENS = 128  # of the plan's rows, which no program here reads


def spread(model: MultimodalModel, n_devices: int, tensors: Sequence[Tensor]) -> Plan:
    """Return a plan that cuts every module in segments and splits their tensors over two devices,
    where they divide and there are as many."""
    ways = {m: _ways(module, n_devices) for m, module in model.modules.items()}
    n_bytes: dict[str, int] = defaultdict(int)
    for t in tensors:
        n_bytes[t.module] += 4 * math.prod(t.layout.file_shape)
    submeshes: list[SubmeshPlan] = []
    segments: list[SegmentPlan] = []
    for name, module in model.modules.items():
        n = min(module.n_layers, max(WAYS, -(-n_bytes[name] // SEGMENT_BYTES)))
        ends = [module.n_layers * i // n for i in range(n + 1)]
        for start, stop in pairwise(ends):
            segment = f"{name}{start}"
            first = len(submeshes) % (n_devices // ways[name]) * ways[name]
            submeshes.append(SubmeshPlan(segment, first, model=ways[name]))
            last = stop == module.n_layers
            segments.append(SegmentPlan(segment, name, start, stop, segment, start == 0, last))
    shapes = {m: Shape(1, model.piece_tokens.get(m, TOKENS)) for m in model.modules}
    tied = tuple(m for m, module in model.modules.items() if module.tied)
    return Plan(
        "verify",
        Layout(
            tuple(submeshes),
            tuple(segments),
            (Bucket.of(shapes),),
            edges=edges_of(model),
            tied=tied,
        ),
    )


def _ways(module: Module, n_devices: int) -> int:
    for part in module.inputs if n_devices >= WAYS else ():
        specs = jax.eval_shape(lambda key, part=part: module.init(part, key), jax.random.key(0))
        axes = module.logical_axes(part)
        for path, spec in jax.tree_util.tree_leaves_with_path(specs):
            names = axes
            for key in path:
                names = names[key.key]
            dim = split_dim(spec.shape, names, WAYS)
            if dim is not None and spec.shape[dim] % WAYS:
                return 1
    return WAYS if n_devices >= WAYS else 1


def round_trip(
    folder: Folder,
    model: MultimodalModel,
    layout: Layout,
    devices: list[jax.Device],
    tick: Callable[[int, int], None],
) -> list[TensorGroup]:
    """Read every segment of a plan, write it to a file and compare that with the folder's.

    Args:
      folder: checked.
      tick: is told how many of how many segments are done.

    Returns:
      The groups of the model's tensors, then the folder's copies of a tied tensor, if it has any:
      they are not read, but must equal what they are copies of.

    Raises:
      ValueError: the plan is another model's, or does not fit the devices.
    """
    part_of = {t.name: f"{t.module}.{t.part}" for t in folder.map.tensors}
    identical: dict[str, bool] = {}
    segments = make_segments(model, layout, devices)
    with TemporaryDirectory(prefix="dflop-verify-") as scratch:
        file = Path(scratch) / "segment.safetensors"
        for i, segment in enumerate(segments.values()):
            tick(i, len(segments))
            held = ModuleParams(
                segment.plan.module, read_segment(folder, segment), segment.held_rows
            )
            names = write_segment(file, folder.map, held, folder)
            del held
            for name in names:
                identical[name] = identical.get(name, True) and _as_written(folder, name, file)
            file.unlink()
    tick(len(segments), len(segments))
    for copy, original in folder.map.copies.items():
        if copy in folder.entries:
            part_of[copy] = "copies of tied tensors"
            identical[copy] = _same(folder, copy, original)
    groups: dict[str, list[str]] = {}
    for name, group in part_of.items():
        groups.setdefault(group, []).append(name)
    return [
        TensorGroup(
            group, len(names), _bytes(folder, names), sum(identical.get(n, False) for n in names)
        )
        for group, names in groups.items()
    ]


def _bytes(folder: Folder, names: Sequence[str]) -> int:
    entries = [folder.entries[name] for name in names]
    return sum(math.prod(e.shape) * np.dtype(DTYPES[e.dtype]).itemsize for e in entries)


def _slices(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Pieces of an array, cut along its first dim."""
    if not shape:
        yield ()
        return
    rows = max(1, COMPARED_BYTES // max(1, 4 * math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        rest = (slice(0, n) for n in shape[1:])
        yield (slice(start, min(start + rows, shape[0])), *rest)


def _as_written(folder: Folder, name: str, file: Path) -> bool:
    entry = folder.entries[name]
    with safe_open(file, framework="numpy") as written:
        tensor = written.get_slice(entry.name)
        if (tuple(tensor.get_shape()), tensor.get_dtype()) != (entry.shape, entry.dtype):
            return False
        return all(_equal(tensor[part], folder.read(name, part)) for part in _slices(entry.shape))


def _same(folder: Folder, a: str, b: str) -> bool:
    shape = folder.entries[a].shape  # which opening the folder has found to be equal
    return all(_equal(folder.read(a, part), folder.read(b, part)) for part in _slices(shape))


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()
