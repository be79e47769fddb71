"""A round trip of a folder's weights: into the shards of a plan and back, compared bit by bit.

Only one segment is in memory at a time, so a folder may be larger than the memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np

from dflop_jax.contract import MultimodalModel, edges_of
from dflop_jax.plan.placement import Parallelism, build_layout
from dflop_jax.profile.traced_parts import divides
from dflop_jax.records import Bucket, Layout, MeshShape, Shape
from dflop_jax.runtime.layout import make_segments
from dflop_jax.weights import Folder, ModuleParams, read_segment, segment_tensors
from dflop_jax.weights.contract import Tensor
from dflop_jax.weights.folder import DTYPES

SEGMENT_BYTES = 2 * 10**9  # approximate size of a segment's parameters
TP_DEGREE = 2  # devices that a tensor is split over


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of a part of a module, such as "llm.layers"."""

    name: str
    tensors: int
    n_bytes: int  # in the folder's files
    identical: int  # tensors whose bits did not change
    max_grad_error: float | None = None  # see `VerifyResult`; None: not compared


def split_layout(model: MultimodalModel, n_devices: int, tensors: Sequence[Tensor]) -> Layout:
    """Return a layout that cuts every module into segments and splits their tensors over
    `TP_DEGREE` devices, if they divide and there are enough devices."""
    tp = {
        m: TP_DEGREE if n_devices >= TP_DEGREE and divides(module, TP_DEGREE) else 1
        for m, module in model.modules.items()
    }
    n_bytes: dict[str, int] = defaultdict(int)
    for t in tensors:
        n_bytes[t.module] += 4 * math.prod(t.layout.file_shape)
    n_layers = {m: module.n_layers for m, module in model.modules.items()}
    n_stages = {
        m: min(n, max(TP_DEGREE, -(-n_bytes[m] // SEGMENT_BYTES))) for m, n in n_layers.items()
    }
    forms = [Parallelism(MeshShape(model=tp[m]), n) for m, n in n_stages.items()]
    laid = build_layout(forms, [0] * len(forms), n_layers)
    submeshes = tuple(
        replace(s, first=i % (n_devices // s.model) * s.model) for i, s in enumerate(laid.submeshes)
    )
    shapes = {m: Shape(1, model.piece_tokens.get(m, 1)) for m in model.modules}  # of rows, unread
    tied = tuple(m for m, module in model.modules.items() if module.tied)
    buckets = (Bucket.from_shapes(shapes),)
    return replace(laid, submeshes=submeshes, buckets=buckets, edges=edges_of(model), tied=tied)


def round_trip(
    folder: Folder,
    model: MultimodalModel,
    layout: Layout,
    devices: list[jax.Device],
    tick: Callable[[int, int], None],
) -> list[TensorGroup]:
    """Read every segment of a plan, and compare its tensors as they would be written with the
    folder. Return the groups of the model's tensors, then the group of the folder's copies of tied
    tensors, which must equal their originals. ValueError if the plan is another model's or does not
    fit the devices."""
    group_by_name = {t.name: f"{t.module}.{t.part}" for t in folder.map.tensors}
    identical: dict[str, bool] = {}
    segments = make_segments(model, layout, devices)
    for i, segment in enumerate(segments.values()):
        tick(i, len(segments))
        params = read_segment(folder, segment)
        module_params = ModuleParams(segment.plan.module, params, segment.layer_rows)
        for name, tensor in segment_tensors(module_params, folder).items():
            is_identical = _is_equal(tensor.values(), folder.read(name, ()))
            identical[name] = identical.get(name, True) and is_identical
    tick(len(segments), len(segments))
    for copy, original in folder.map.copies.items():
        if copy in folder.entries:
            group_by_name[copy] = "copies of tied tensors"
            identical[copy] = _is_equal(folder.read(copy, ()), folder.read(original, ()))
    groups: dict[str, list[str]] = {}
    for name, group in group_by_name.items():
        groups.setdefault(group, []).append(name)
    result = []
    for group, names in groups.items():
        entries = [folder.entries[name] for name in names]
        n_bytes = sum(math.prod(e.shape) * np.dtype(DTYPES[e.dtype]).itemsize for e in entries)
        n_identical = sum(identical.get(n, False) for n in names)
        result.append(TensorGroup(group, len(names), n_bytes, n_identical))
    return result


def _is_equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays are equal bit by bit."""
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()
