"""The arrays of a run's state by name, whatever the plan, and where each process has its pieces."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from dflop_jax.checkpoint.format import ArraySpec
from dflop_jax.checkpoint.reader import CheckpointReader
from dflop_jax.contract import n_stacked_layers
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.parameter_layout import initial_structs, initial_zero_specs
from dflop_jax.runtime.segment import Segment
from dflop_jax.runtime.update import part_of_leaves
from dflop_jax.runtime.zero_sharding import Box, ZeroSpec


@dataclass(frozen=True)
class StateArray:
    """Leaf number `leaf` of a segment's "params" or "opt_state".

    Its rows are those numbered `rows` of the array `name` of `n_rows`, or (None) it is all of that
    array, which one segment of those that hold it `saves`. `cut` says how data ranks share it.
    """

    name: str
    segment: str
    kind: str
    leaf: int
    struct: jax.ShapeDtypeStruct
    cut: ZeroSpec
    rows: tuple[int, ...]
    n_rows: int | None
    saves: bool

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.cut.full_shape(self.struct.shape)
        return shape if self.n_rows is None else (self.n_rows, *shape[1:])

    def boxes(self, index: tuple[slice, ...]) -> Iterator[tuple[Any, Box]]:
        """The boxes of the array that a shard has, and where they lie in it: see
        `ZeroSpec.boxes`."""
        spans = self._spans(index)
        if self.n_rows is None:
            return self.cut.boxes(spans)
        return self.cut.layer_boxes(spans, self.rows)

    def is_first_replica(self, index: tuple[slice, ...]) -> bool:
        """Whether a shard is of the first block of ranks, where several have the same."""
        return self.cut.is_first_replica(self._spans(index))

    def _spans(self, index: tuple[slice, ...]) -> Box:
        return tuple(s.indices(n)[:2] for s, n in zip(index, self.struct.shape, strict=True))


def state_arrays(ex: Executor) -> list[StateArray]:
    """Every leaf of the parameters and the optimizer state, of all processes, in a fixed order.

    What all segments of a module hold alike (the optimizer's count) is listed with the first.
    """
    arrays: list[StateArray] = []
    for name, segment in ex.programs.segments.items():
        arrays += parameter_arrays(name, segment)
        if name in ex.trainable:
            update = ex.programs.updates[name]
            facts = update.state_structs, update.state_parts(), update.state_zero_specs()
            arrays += _arrays(name, segment, "opt_state", *facts)
    names: set[str] = set()
    for i, a in enumerate(arrays):
        if a.n_rows is None and a.name in names:
            arrays[i] = replace(a, saves=False)
        names.add(a.name)
    return arrays


def parameter_arrays(name: str, segment: Segment) -> list[StateArray]:
    """Every leaf of a segment's `initial_structs`, in their order."""
    structs = initial_structs(segment)
    return _arrays(
        name, segment, "params", structs, part_of_leaves(structs), initial_zero_specs(segment)
    )


def _arrays(
    name: str, segment: Segment, kind: str, structs: Any, part_tree: Any, cuts: Any
) -> list[StateArray]:
    leaves = jax.tree_util.tree_leaves_with_path(structs)
    facts = zip(leaves, jax.tree.leaves(part_tree), jax.tree.leaves(cuts), strict=True)
    arrays = []
    for i, ((path, struct), part_name, cut) in enumerate(facts):
        leaf_name = jax.tree_util.keystr(path, simple=True, separator="/")
        n = n_stacked_layers(segment.module, part_name) if part_name in segment.stacked else None
        rows = segment.layer_rows.get(part_name, ())
        array = f"{kind}/{segment.plan.module}/{leaf_name}"
        arrays.append(StateArray(array, name, kind, i, struct, cut, rows, n, saves=True))
    return arrays


def specs_of(arrays: list[StateArray]) -> dict[str, ArraySpec]:
    """The global arrays by name."""
    return {a.name: ArraySpec(a.name, a.shape, a.struct.dtype.name) for a in arrays}


def read_array(reader: CheckpointReader, a: StateArray) -> jax.Array:
    """An array of a checkpoint, each process its own slices.

    Raises:
      CorruptCheckpoint: a file that is needed is damaged.
    """

    def load(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        spans = (s.indices(n) for s, n in zip(index, struct.shape, strict=True))
        shard = np.zeros([stop - start for start, stop, _ in spans], struct.dtype)
        for position, box in a.boxes(index):
            read = reader.read(a.name, [b[0] for b in box], [b[1] - b[0] for b in box])
            shard[position] = read.reshape(shard[position].shape)
        return shard

    struct = a.struct
    return jax.make_array_from_callback(struct.shape, struct.sharding, load, dtype=struct.dtype)
