"""Parameters of another run, to begin with: those of one of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dflop_jax.checkpoint.reader import CheckpointReader
from dflop_jax.checkpoint.state_arrays import StateArray, parameter_arrays, read_array
from dflop_jax.checkpoint.store import CheckpointStore
from dflop_jax.contract import Params
from dflop_jax.pipeline.held import initial_structs
from dflop_jax.pipeline.int8 import codes, is_codes, scale_of, scales_of
from dflop_jax.pipeline.segment import Segment


def open_saved(checkpoints: Path, step: int | None) -> CheckpointReader:
    """The checkpoint of a step, the newest for None.

    Raises:
      ValueError: it is not there.
      CorruptCheckpoint, StorageError, OtherVersion: it cannot be read.
    """
    store = CheckpointStore(checkpoints)
    steps = store.steps()
    if not steps or (step is not None and step not in steps):
        raise ValueError(store.no_step(step, steps))
    return store.open(steps[0] if step is None else step)


def read_saved(reader: CheckpointReader, segment: Segment, fresh: Callable[[], Params]) -> Params:
    """A segment's parameters from a checkpoint of a run of the same model under any plan. Parts of
    which it has nothing (adapters that the run had not) are fresh. Floats of what the segment holds
    in 8 bits are rounded.

    Raises:
      ValueError: it has nothing of the module, parts that the module has not, or other shapes.
    """
    module, where = segment.plan.module, f"the checkpoint of step {reader.step}"
    known = {part_of(name) for name in reader.specs if name.startswith(f"params/{module}/")}
    if not known:
        raise ValueError(
            f"{where} has no parameters of {module}: it is of another model, name a run of this one"
        )
    if lost := sorted(known - set(segment.module.inputs)):
        raise ValueError(
            f"{where} has {', '.join(lost)} of {module}, which this model has not (adapters need "
            "train.lora_rank; or begin with an export, which merges them)"
        )
    arrays = parameter_arrays(segment.name, segment)
    source = _Rounding(reader, arrays)
    leaves: list[Any] = []
    drawn: list[Any] = []
    for a in arrays:
        if a.name in source.matrix_of:  # which is checked where it stands
            leaves.append(read_array(source, a))
            continue
        if part_of(a.name) not in known:
            drawn = drawn or jax.tree.leaves(fresh())
            leaves.append(drawn[a.leaf])
            continue
        spec = reader.specs.get(a.name)
        if spec is None or spec.shape != a.shape:
            has = list(spec.shape) if spec else "nothing"
            raise ValueError(
                f"{where} has {has} as {a.name}, this model needs {list(a.shape)}: it is of "
                "another model, name a run of this one"
            )
        if spec.numpy_dtype == np.int8 != a.struct.dtype:
            raise ValueError(
                f"{where} has {a.name} in 8 bits, which this model holds as floats: go on with "
                "model.quantize_frozen, or begin with an export"
            )
        leaves.append(read_array(source, a))
    return jax.tree.unflatten(jax.tree.structure(initial_structs(segment)), leaves)


class _Rounding:
    """A checkpoint to read arrays from, where matrices that are wanted in 8 bits may be floats.

    Attributes:
      matrix_of: scales that it has not -> the matrix that they are of.
    """

    def __init__(self, reader: CheckpointReader, arrays: Sequence[StateArray]):
        self._reader = reader
        by_name = {a.name: a for a in arrays}
        self._rounded: dict[str, tuple[bool, int]] = {}  # matrix -> (stacked, dims of its outputs)
        self.matrix_of: dict[str, str] = {}
        for a in arrays:
            spec = reader.specs.get(a.name)
            if is_codes(a.struct) and spec is not None and spec.numpy_dtype != np.int8:
                beside, stacked = by_name[scale_of(a.name)], a.n_rows is not None
                self._rounded[a.name] = stacked, len(beside.shape) - stacked
                self.matrix_of[beside.name] = a.name
        self._known: dict[tuple[str, int], np.ndarray] = {}

    def read(self, name: str, start: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        """See `CheckpointReader.read`."""
        matrix = self.matrix_of.get(name, name)
        if matrix not in self._rounded:
            return self._reader.read(name, start, shape)
        stacked, n_out = self._rounded[matrix]
        ends = [lo + n for lo, n in zip(start, shape, strict=True)]
        outputs = tuple(slice(*b) for b in zip(start[-n_out:], ends[-n_out:], strict=True))
        rows = range(start[0], ends[0]) if stacked else [0]
        beside = [self._scales(matrix, row)[outputs] for row in rows]
        if name != matrix:
            return np.stack(beside) if stacked else beside[0]
        values = self._reader.read(name, start, shape)
        if not stacked:
            return codes(values, beside[0])
        return np.stack([codes(v, s) for v, s in zip(values, beside, strict=True)])

    def _scales(self, matrix: str, row: int) -> np.ndarray:
        """The scales [*out] of a matrix, of the layer in a row of those that are stacked."""
        if (matrix, row) not in self._known:
            stacked, n_out = self._rounded[matrix]
            shape = self._reader.specs[matrix].shape
            start = [row, *[0] * (len(shape) - 1)] if stacked else [0] * len(shape)
            whole = self._reader.read(matrix, start, [1, *shape[1:]] if stacked else shape)
            layer = whole[0] if stacked else whole
            self._known[matrix, row] = scales_of(layer, layer.ndim - n_out)
        return self._known[matrix, row]


def part_of(array: str) -> str:
    """The part of a module that a parameter is in, by the name of its array."""
    return array.split("/")[2]
