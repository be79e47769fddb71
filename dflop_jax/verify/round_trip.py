"""From a folder into the shards of a plan, and back: is every bit as it was?

One segment lies in memory at a time, so that a folder may be larger than the memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np

from dflop_jax.contract import MultimodalModel, edges_of
from dflop_jax.plan.placement import Parallelism, build_layout
from dflop_jax.profile.traced_parts import divides
from dflop_jax.records import Bucket, Layout, MeshShape, Shape
from dflop_jax.runtime.layout import make_segments
from dflop_jax.runtime.segment import Segment
from dflop_jax.weights import Folder, ModuleParams, read_segment, segment_tensors
from dflop_jax.weights.contract import Tensor
from dflop_jax.weights.folder import DTYPES
from dflop_jax.weights.read import Reader

SEGMENT_BYTES = 2 * 10**9  # of a segment's shards, about
COMPARED_BYTES = 32 * 2**20  # of a tensor at a time
TP_DEGREE = 2  # devices that a tensor is split over
TOKENS = 128  # of the plan's rows, which no program here reads


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of a part of a module, such as "llm.layers".

    Attributes:
      n_bytes: in the folder's files.
      identical: how many of them were written as they are there, bit by bit.
      max_grad_error: see `VerifyResult`; None where gradients were not compared.
    """

    name: str
    tensors: int
    n_bytes: int
    identical: int
    max_grad_error: float | None = None


def split_layout(model: MultimodalModel, n_devices: int, tensors: Sequence[Tensor]) -> Layout:
    """Return a layout that cuts every module in segments and splits their tensors over two devices,
    where they divide and there are as many."""
    tp = {
        m: TP_DEGREE if n_devices >= TP_DEGREE and divides(module, TP_DEGREE) else 1
        for m, module in model.modules.items()
    }
    n_bytes: dict[str, int] = defaultdict(int)
    for t in tensors:
        n_bytes[t.module] += 4 * math.prod(t.layout.file_shape)
    n_layers = {m: module.n_layers for m, module in model.modules.items()}
    forms = [
        Parallelism(MeshShape(model=tp[m]), min(n, max(TP_DEGREE, -(-n_bytes[m] // SEGMENT_BYTES))))
        for m, n in n_layers.items()
    ]
    laid = build_layout(forms, [0] * len(forms), n_layers)
    submeshes = tuple(
        replace(s, first=i % (n_devices // s.model) * s.model) for i, s in enumerate(laid.submeshes)
    )
    shapes = {m: Shape(1, model.piece_tokens.get(m, TOKENS)) for m in model.modules}
    tied = tuple(m for m, module in model.modules.items() if module.tied)
    return replace(
        laid,
        submeshes=submeshes,
        buckets=(Bucket.from_shapes(shapes),),
        edges=edges_of(model),
        tied=tied,
    )


def round_trip(
    folder: Folder,
    model: MultimodalModel,
    layout: Layout,
    devices: list[jax.Device],
    tick: Callable[[int, int], None],
) -> list[TensorGroup]:
    """Read every segment of a plan, and compare what would be written of it with the folder.

    Args:
      folder: checked.
      tick: is told how many of how many segments are done.

    Returns:
      The groups of the model's tensors, then the folder's copies of a tied tensor, if it has any:
      they are not read, but must equal what they are copies of.

    Raises:
      ValueError: the plan is another model's, or does not fit the devices.
    """
    group_by_name = {t.name: f"{t.module}.{t.part}" for t in folder.map.tensors}
    identical: dict[str, bool] = {}
    segments = make_segments(model, layout, devices)
    for i, segment in enumerate(segments.values()):
        tick(i, len(segments))
        for name, is_identical in _compare_segment(folder, segment).items():
            identical[name] = identical.get(name, True) and is_identical
    tick(len(segments), len(segments))
    for copy, original in folder.map.copies.items():
        if copy in folder.entries:
            group_by_name[copy] = "copies of tied tensors"
            shape = folder.entries[copy].shape  # opening the folder has found both to be of it
            both = (partial(folder.read, name) for name in (copy, original))
            identical[copy] = _is_equal(shape, *both)
    groups: dict[str, list[str]] = {}
    for name, group in group_by_name.items():
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


def _compare_segment(folder: Folder, segment: Segment) -> dict[str, bool]:
    """By canonical name whether what would be written of a segment's tensors is in the folder."""
    module_params = ModuleParams(
        segment.plan.module, read_segment(folder, segment), segment.layer_rows
    )
    return {
        name: _is_equal(tensor.shape, tensor.values().__getitem__, partial(folder.read, name))
        for name, tensor in segment_tensors(module_params, folder).items()
    }


def _is_equal(shape: tuple[int, ...], read_a: Reader, read_b: Reader) -> bool:
    """Whether two arrays of a shape are the same bit by bit, read in pieces along the first dim."""
    rows = max(1, COMPARED_BYTES // max(1, 4 * math.prod(shape[1:])))
    rest = [slice(0, n) for n in shape[1:]]
    firsts = [slice(i, min(i + rows, shape[0])) for i in range(0, shape[0], rows)] if shape else []
    for index in [(first, *rest) for first in firsts] or [()]:
        a, b = read_a(index), read_b(index)
        if a.dtype != b.dtype or a.tobytes() != b.tobytes():
            return False
    return True
