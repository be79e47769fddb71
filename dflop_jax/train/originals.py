"""What a run's matrices in 8 bits were rounded from: the weights that it began with.

A merged export starts from these, since an adapter learnt beside the rounded ones, whose errors it
should not hand on. Nothing but the place of the weights is kept: that they are the same is told by
rounding them again, which gives every code and every scale that the run holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflop_jax.checkpoint.begin import open_saved
from dflop_jax.checkpoint.store import CorruptCheckpoint, OtherVersion, StorageError
from dflop_jax.contract import MultimodalModel, Params, stacked_parts
from dflop_jax.pipeline.int8 import codes, is_codes, is_quantized, scale_of, scales_of
from dflop_jax.report.run_folder import CHECKPOINTS
from dflop_jax.train.initial import map_of, run_and_step, run_config
from dflop_jax.weights import Folder, read_params

Path_ = tuple[str, ...]  # of a parameter: its part, then its keys there
HINT = (
    "put it back, name where it is now by --weights, or write the adapters alone (export --adapter)"
)


def with_originals(
    params: Mapping[str, Params], name: str, model: MultimodalModel, weights: Sequence[str]
) -> Mapping[str, Params]:
    """A module's parameters with the floats of the weights in the place of matrices in 8 bits.
    Those that no weights have (parts that began fresh) stay as they are.

    Args:
      params: as a checkpoint has them, layers stacked.
      weights: see `initial.published`.

    Raises:
      ValueError: weights that are gone, cannot be read, or are others than the run began with.
    """
    module = model.modules[name]
    if not is_quantized(module):
        return params
    rounded = dict(_rounded(params))
    stacked = stacked_parts(module)
    for path, original in _originals(model, name, list(rounded), weights, rounded):
        matrix, scale = rounded[path]
        layers = range(matrix.shape[0]) if path[0] in stacked else [...]
        if not all(_is_of(original[i], matrix[i], scale[i]) for i in layers):
            raise ValueError(
                f"model.weights: {name}.{'.'.join(path)} is not what the run began with, as it is "
                f"now in {', '.join(weights)}; {HINT}"
            )
        params = _replaced(params, path, original)
    return params


def _rounded(tree: Any, path: Path_ = ()) -> Iterator[tuple[Path_, tuple[Any, Any]]]:
    """(path, (codes, scales)) of every matrix in 8 bits."""
    for key, leaf in tree.items():
        if isinstance(leaf, Mapping):
            yield from _rounded(leaf, (*path, key))
        elif is_codes(leaf) and scale_of(key) in tree:
            yield (*path, key), (np.asarray(leaf), np.asarray(tree[scale_of(key)]))


def _is_of(original: np.ndarray, matrix: np.ndarray, scale: np.ndarray) -> bool:
    """Whether codes and scales are those of a matrix."""
    own = scales_of(original, matrix.ndim - scale.ndim)
    return np.array_equal(own, scale) and np.array_equal(codes(original, own), matrix)


def _replaced(tree: Mapping[str, Any], path: Path_, original: np.ndarray) -> dict[str, Any]:
    key, *rest = path
    if rest:
        return {**tree, key: _replaced(tree[key], tuple(rest), original)}
    return {**{k: leaf for k, leaf in tree.items() if k != scale_of(key)}, key: original}


def _originals(
    model: MultimodalModel,
    name: str,
    paths: Sequence[Path_],
    weights: Sequence[str],
    like: Mapping[Path_, tuple[Any, Any]],
) -> Iterator[tuple[Path_, np.ndarray]]:
    """Those of some matrices of a module that weights have, float32."""
    for item in weights:
        module, _, place = item.rpartition("=")
        if module not in ("", name):
            continue
        run, _, step = run_and_step(place)
        if Path(run, CHECKPOINTS).is_dir():
            yield from _of_run(model, name, paths, run, step, like)
        elif Path(place).is_dir():
            folder = Folder(place, map_of(model, module, len(weights) == 1))
            folder.check()
            here = {(t.part, *t.path) for t in folder.map.tensors if t.module == name}
            found = [path for path in paths if path in here]
            yield from _of_folder(folder, name, found, like)
        else:
            raise ValueError(
                f"model.weights={place} is gone, and the run holds its matrices in 8 bits only; "
                f"{HINT}"
            )


def _of_folder(
    folder: Folder, name: str, paths: Sequence[Path_], like: Mapping[Path_, tuple[Any, Any]]
) -> Iterator[tuple[Path_, np.ndarray]]:
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    for path in paths:
        struct: Any = jax.ShapeDtypeStruct(like[path][0].shape, np.float32, sharding=host)
        for key in reversed(path):
            struct = {key: struct}
        (array,) = jax.tree.leaves(read_params(folder, name, struct))
        yield path, np.asarray(array)


def _of_run(
    model: MultimodalModel,
    name: str,
    paths: Sequence[Path_],
    run: str,
    step: str,
    like: Mapping[Path_, tuple[Any, Any]],
) -> Iterator[tuple[Path_, np.ndarray]]:
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
                whole = reader.read(array, [0] * len(spec.shape), spec.shape)
                yield path, whole.astype(np.float32)
    except (CorruptCheckpoint, OtherVersion, StorageError) as e:
        raise ValueError(f"model.weights={run}: {e}; {HINT}") from None
    if before:
        yield from _originals(model, name, before, run_config(run).model.weights, like)
