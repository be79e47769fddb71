"""Parameters as trees of arrays that are read, or computed, when they are asked for: of a model
that is written, one matrix of one layer is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dflop_jax.checkpoint.store import CheckpointReader
from dflop_jax.contract import MultimodalModel, Params
from dflop_jax.train.load_params import saved_name, shapes_of


@dataclass(frozen=True, eq=False)
class LazyArray:
    """An array of which `array[row]` reads a row along the first dim and `np.asarray(array)` all.

    Attributes:
      read: gives a row, or all (None).
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[int | None], np.ndarray]

    def __getitem__(self, row: int) -> np.ndarray:
        return self.read(row)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = self.read(None)
        return whole if dtype is None else whole.astype(dtype)


def saved_array(reader: CheckpointReader, name: str) -> LazyArray:
    """An array of a checkpoint.

    Raises, where it is read:
      CorruptCheckpoint, StorageError: it cannot be.
    """
    shape = tuple(reader.specs[name].shape)

    def read(row: int | None) -> np.ndarray:
        if row is None:
            return reader.read(name, [0] * len(shape), shape)
        rest = shape[1:]
        return reader.read(name, (row, *(0 for _ in rest)), (1, *rest))[0]

    return LazyArray(shape, reader.specs[name].numpy_dtype, read)


def saved_params(
    reader: CheckpointReader, model: MultimodalModel, *, average: bool = False
) -> dict[str, Params]:
    """A checkpoint's parameters of each module, layers stacked; `average`: of what trains, its
    average over steps.

    Raises:
      ValueError: it is of another model, or has no average.
    """

    def module(name: str) -> Params:
        return jax.tree_util.tree_map_with_path(
            lambda path, struct: saved_array(
                reader, saved_name(reader, name, path, struct.shape, average=average)
            ),
            shapes_of(model.modules[name]),
        )

    return {name: module(name) for name in model.modules}


def computed(function: Callable[..., Any], *arrays: Any) -> LazyArray:
    """What a function gives of arrays, on the host.

    Args:
      function: of rows of the arrays it gives a row, of all of them all.
    """
    structs = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays)
    made = jax.eval_shape(function, *structs)

    def read(row: int | None) -> np.ndarray:
        inputs = (np.asarray(a if row is None else a[row]) for a in arrays)
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return np.asarray(function(*inputs))

    return LazyArray(made.shape, made.dtype, read)
