"""The parameters in a checkpoint as trees of arrays that are read when they are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dflop_jax.checkpoint.reader import CheckpointReader


@dataclass(frozen=True, eq=False)
class SavedArray:
    """An array of a checkpoint, of which `array[i]` reads a row and `np.asarray(array)` all.

    Raises, where it is read:
      CorruptCheckpoint, StorageError: it cannot be.
    """

    reader: CheckpointReader
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.reader.specs[self.name].shape)

    @property
    def dtype(self) -> np.dtype:
        return self.reader.specs[self.name].numpy_dtype

    def __getitem__(self, row: int) -> np.ndarray:
        rest = self.shape[1:]
        return self.reader.read(self.name, (row, *(0 for _ in rest)), (1, *rest))[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = self.reader.read(self.name, [0] * len(self.shape), self.shape)
        return whole if dtype is None else whole.astype(dtype)


def saved_params(reader: CheckpointReader, module: str, average: str = "") -> dict[str, Any]:
    """A module's parameters, layers stacked, by part and name; `average`: the name under which the
    optimizer's state has their average, which then stands in the place of what has one."""
    tree: dict[str, Any] = {}
    start = f"params/{module}/"
    for name in reader.specs:
        if not name.startswith(start):
            continue
        where = name.removeprefix(start)
        mean = f"opt_state/{module}/{average}/{where}"
        *path, leaf = where.split("/")
        node = tree
        for key in path:
            node = node.setdefault(key, {})
        node[leaf] = SavedArray(reader, mean if average and mean in reader.specs else name)
    return tree
