"""The parameters of a checkpoint, whatever plan it was saved under: laid out on devices, or as
trees of arrays that are read, or computed, when they are asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from dflop_jax.checkpoint.store import CheckpointReader, CheckpointStore, CorruptCheckpoint
from dflop_jax.contract import MultimodalModel, Params, fold_adapters
from dflop_jax.report.run_folder import CHECKPOINTS, CONFIG
from dflop_jax.runtime.module_parts import module_structs
from dflop_jax.runtime.update import EMA_KEY

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class LoadedParams:
    """Parameters of each module after `step` steps, layers stacked."""

    params: dict[str, Params]
    step: int
    folder: Path


def load_params(
    run: str | Path,
    model: MultimodalModel,
    placement: jax.Device | Mapping[str, Params],
) -> LoadedParams:
    """Return those of the newest whole checkpoint of a run folder, or of the checkpoint folder
    given, adapters folded into what they adapt.

    Args:
      placement: one device, for whole arrays as they were saved; or by module the shapes, dtypes
        and shardings of its parts.

    Raises:
      ValueError: it is of another model; see `use_newest_checkpoint`.
      StorageError: it cannot be read.
    """

    def load(reader: CheckpointReader, folder: Path) -> LoadedParams:
        params = {}
        for name, lazy_params in open_params(reader, model).items():
            structs = (
                placement[name]
                if isinstance(placement, Mapping)
                else _single_device_structs(lazy_params, placement)
            )
            params[name] = fold_adapters(
                model.modules[name], jax.tree.map(_make_device_array, structs, lazy_params)
            )
        return LoadedParams(params, reader.step, folder)

    return use_newest_checkpoint(run, load)


def use_newest_checkpoint(run: str | Path, read: Callable[[CheckpointReader, Path], T]) -> T:
    """What a function gives for the newest whole checkpoint of a run folder, or for the checkpoint
    folder given, and its place. One that turns out damaged is named in the log and the one before
    it is taken.

    Raises:
      ValueError: no such folder, or no (whole) checkpoint in it.
      StorageError, OtherVersion: it cannot be read.
    """
    store, steps = _find_checkpoints(Path(run))
    for step in steps:
        try:
            return read(store.open(step), store.folder(step))
        except CorruptCheckpoint as e:
            log.warning("checkpoint of step %d is damaged, using an older one: %s", step, e)
    raise ValueError(f"{run}: no checkpoint is whole; take another run, or train it again")


def _find_checkpoints(path: Path) -> tuple[CheckpointStore, tuple[int, ...]]:
    """Return the store that `path` is or lies in, and the steps to try, newest first."""
    if not path.is_dir():
        raise ValueError(f"{path}: no such run folder; check --checkpoint, or train it first")
    if path.name.isdigit():
        store, step = CheckpointStore(path.parent), int(path.name)
        if step in store.steps():
            return store, (step,)
    for root in (path / CHECKPOINTS, path):
        if steps := CheckpointStore(root).steps():
            return CheckpointStore(root), steps
    reason = "it is no run folder"
    if (path / CONFIG).exists():
        reason = "the run has saved none yet (see --checkpoint.every_s)"
    raise ValueError(f"{path}: no checkpoint in it; {reason}; name another")


def _single_device_structs(arrays: Params, device: jax.Device) -> Params:
    """How arrays lie whole on a device."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arrays)


def _make_device_array(struct: jax.ShapeDtypeStruct, array: LazyArray) -> jax.Array:
    @cache  # devices may hold the same
    def read_box(*bounds: tuple[int, int]) -> np.ndarray:
        return array[tuple(slice(*b) for b in bounds)].astype(struct.dtype, copy=False)

    def read_shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return read_box(*(s.indices(n)[:2] for s, n in zip(index, struct.shape, strict=True)))

    return jax.make_array_from_callback(struct.shape, struct.sharding, read_shard)


@dataclass(frozen=True, eq=False)
class LazyArray:
    """An array of which `array[row]` reads a row along the first dim, `array[slices]` a box, and
    `np.asarray(array)` all.

    Attributes:
      read: gives a box, by slices of its first dims.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[tuple[slice, ...]], np.ndarray]

    def __getitem__(self, index: int | tuple[slice, ...]) -> np.ndarray:
        if isinstance(index, tuple):
            return self.read(index)
        return self.read((slice(index, index + 1),))[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = self.read(())
        return whole if dtype is None else whole.astype(dtype)


def open_params(
    reader: CheckpointReader, model: MultimodalModel, *, average: bool = False
) -> dict[str, Params]:
    """A checkpoint's parameters of each module as `LazyArray`s, layers stacked; `average`: of what
    trains, its average over steps.

    Raises:
      ValueError: it is of another model, or has no average.
    """
    if average and not any(f"/{EMA_KEY}/" in name for name in reader.specs):
        raise ValueError(
            f"{reader}: has no average of the parameters; train with train.ema, or leave out --ema"
        )

    def open_array(module: str, path: Any, struct: jax.ShapeDtypeStruct) -> LazyArray:
        leaf_name, shape = jax.tree_util.keystr(path, simple=True, separator="/"), struct.shape
        name, average_name = (
            f"params/{module}/{leaf_name}",
            f"opt_state/{module}/{EMA_KEY}/{leaf_name}",
        )
        if average and average_name in reader.specs:
            name = average_name
        spec = reader.specs.get(name)
        if spec is None or spec.shape != shape:
            stored = f"{name} as {list(spec.shape)}" if spec else f"no {name}"
            raise ValueError(
                f"{reader}: has {stored}, the model needs {list(shape)}; give the experiment that "
                "it was trained with"
            )

        def read(index: tuple[slice, ...]) -> np.ndarray:
            full_dims = [slice(None)] * (len(shape) - len(index))
            bounds = [s.indices(n)[:2] for s, n in zip((*index, *full_dims), shape, strict=True)]
            return reader.read(name, [lo for lo, _ in bounds], [hi - lo for lo, hi in bounds])

        return LazyArray(shape, spec.numpy_dtype, read)

    return {
        name: jax.tree_util.tree_map_with_path(partial(open_array, name), module_structs(module))
        for name, module in model.modules.items()
    }


def apply_lazily(function: Callable[..., Any], *arrays: Any) -> LazyArray:
    """What a function gives of arrays, or of as many rows of each, on the host."""
    struct = jax.eval_shape(function, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays))

    def compute(index: tuple[slice, ...]) -> np.ndarray:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return np.asarray(function(*(np.asarray(a[index]) for a in arrays)))

    return LazyArray(struct.shape, struct.dtype, compute)
