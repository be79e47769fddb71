"""What a run's matrices in 8 bits were rounded from: the weights that it began with.

A merged export starts from these, since an adapter learnt beside the rounded ones, whose errors it
should not hand on. Nothing but the place of the weights is kept: that they are the same is told by
rounding them again as they are read, which gives every code and every scale that the run holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflop_jax.checkpoint.begin import open_saved
from dflop_jax.checkpoint.store import CorruptCheckpoint, OtherVersion, StorageError
from dflop_jax.contract import MultimodalModel, Params, stacked_parts
from dflop_jax.pipeline.int8 import codes, is_codes, is_quantized, scale_of, scales_of
from dflop_jax.report.run_folder import CHECKPOINTS
from dflop_jax.train.initial import map_of, run_and_step
from dflop_jax.train.lazy_params import LazyArray, saved_array
from dflop_jax.train.run_dir import run_config
from dflop_jax.weights import Folder, file_values
from dflop_jax.weights.contract import Tensor

Path_ = tuple[str, ...]  # of a parameter: its part, then its keys there
HINT = (
    "put it back, name where it is now by --weights, or write the adapters alone (export --adapter)"
)


def with_originals(
    params: Mapping[str, Params], name: str, model: MultimodalModel, weights: Sequence[str]
) -> Mapping[str, Params]:
    """A module's parameters with the floats of the weights, float32, which are read when they are
    asked for, in the place of matrices in 8 bits. Those that no weights have (parts that began
    fresh) stay as they are.

    Args:
      params: as a checkpoint has them, layers stacked.
      weights: see `initial.published`.

    Raises:
      ValueError: weights that are gone or cannot be read; where they are read: that are others than
        the run began with.
    """
    module = model.modules[name]
    if not is_quantized(module):
        return params
    rounded = dict(_rounded(params))
    stacked = stacked_parts(module)
    for path, original in _originals(model, name, list(rounded), weights):
        where = ".".join((name, *path))
        known = _checked(original, rounded[path], path[0] in stacked, where, weights)
        params = _replaced(params, path, known)
    return params


def _checked(
    original: LazyArray,
    rounded: tuple[Any, Any],
    is_stacked: bool,
    where: str,
    weights: Sequence[str],
) -> LazyArray:
    """A matrix, or a stack of such, of which codes and scales are; ValueError, where it is read, if
    they are of another."""

    def read(row: int | None) -> np.ndarray:
        if row is None and is_stacked:
            return np.stack([read(i) for i in range(original.shape[0])])
        value, *of_run = (np.asarray(a if row is None else a[row]) for a in (original, *rounded))
        value = value.astype(np.float32)
        if not _is_of(value, *of_run):
            raise ValueError(
                f"model.weights: {where} is not what the run began with, as it is now in "
                f"{', '.join(weights)}; {HINT}"
            )
        return value

    return LazyArray(original.shape, np.dtype(np.float32), read)


def _rounded(tree: Any, path: Path_ = ()) -> Iterator[tuple[Path_, tuple[Any, Any]]]:
    """(path, (codes, scales)) of every matrix in 8 bits."""
    for key, leaf in tree.items():
        if isinstance(leaf, Mapping):
            yield from _rounded(leaf, (*path, key))
        elif is_codes(leaf) and scale_of(key) in tree:
            yield (*path, key), (leaf, tree[scale_of(key)])


def _is_of(original: np.ndarray, matrix: np.ndarray, scale: np.ndarray) -> bool:
    """Whether codes and scales are those of a matrix."""
    own = scales_of(original, matrix.ndim - scale.ndim)
    return np.array_equal(own, scale) and np.array_equal(codes(original, own), matrix)


def _replaced(tree: Mapping[str, Any], path: Path_, original: LazyArray) -> dict[str, Any]:
    key, *rest = path
    if rest:
        return {**tree, key: _replaced(tree[key], tuple(rest), original)}
    return {**{k: leaf for k, leaf in tree.items() if k != scale_of(key)}, key: original}


def _originals(
    model: MultimodalModel,
    name: str,
    paths: Sequence[Path_],
    weights: Sequence[str],
) -> Iterator[tuple[Path_, LazyArray]]:
    """Those of some matrices of a module that weights have."""
    for item in weights:
        module, _, place = item.rpartition("=")
        if module not in ("", name):
            continue
        run, _, step = run_and_step(place)
        if Path(run, CHECKPOINTS).is_dir():
            yield from _of_run(model, name, paths, run, step)
        elif Path(place).is_dir():
            folder = Folder(place, map_of(model, module, len(weights) == 1))
            folder.check()
            yield from _of_folder(folder, name, paths)
        else:
            raise ValueError(
                f"model.weights={place} is gone, and the run holds its matrices in 8 bits only; "
                f"{HINT}"
            )


def _of_folder(
    folder: Folder, name: str, paths: Sequence[Path_]
) -> Iterator[tuple[Path_, LazyArray]]:
    by_path: dict[Path_, list[Tensor]] = {}
    for tensor in folder.map.tensors:
        if tensor.module == name:
            by_path.setdefault((tensor.part, *tensor.path), []).append(tensor)
    for path in paths:
        if path in by_path:
            yield path, _published_array(folder, by_path[path])


def _published_array(folder: Folder, tensors: Sequence[Tensor]) -> LazyArray:
    """A parameter in a folder: a tensor, or one for each of its layers."""
    shape = tensors[0].layout.shape
    is_stacked = tensors[0].layer is not None

    def one(tensor: Tensor) -> np.ndarray:
        return file_values(folder, tensor, tuple((0, n) for n in shape))

    def read(row: int | None) -> np.ndarray:
        if row is not None:
            return one(tensors[row])
        return np.stack([one(t) for t in tensors]) if is_stacked else one(tensors[0])

    lead = (len(tensors),) if is_stacked else ()
    return LazyArray((*lead, *shape), np.dtype(np.float32), read)


def _of_run(
    model: MultimodalModel,
    name: str,
    paths: Sequence[Path_],
    run: str,
    step: str,
) -> Iterator[tuple[Path_, LazyArray]]:
    """Of a run's checkpoint; what it holds in 8 bits itself, of the weights that it began with."""
    try:
        reader = open_saved(Path(run, CHECKPOINTS), int(step) if step else None)
        before = []
        for path in paths:
            array = f"params/{name}/{'/'.join(path)}"
            spec = reader.specs.get(array)
            if spec is not None and spec.numpy_dtype == np.int8:
                before.append(path)
            elif spec is not None:
                yield path, saved_array(reader, array)
    except (CorruptCheckpoint, OtherVersion, StorageError) as e:
        raise ValueError(f"model.weights={run}: {e}; {HINT}") from None
    if before:
        yield from _originals(model, name, before, run_config(run).model.weights)
