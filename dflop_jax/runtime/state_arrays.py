"""Names of the arrays of a train state, which do not depend on the plan.

Arrays are named by module and parameter, with a module's layers stacked. A leaf of a segment's tree
holds some rows of such an array, and a device's shard of the leaf holds boxes of it. Trained
parameters are named by the optimizer's float32 masters, frozen parameters have their own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import jax

from dflop_jax.contract import n_stacked_layers
from dflop_jax.runtime.executor import Executor
from dflop_jax.runtime.parameter_layout import initial_structs, initial_zero_specs
from dflop_jax.runtime.segment import Segment
from dflop_jax.runtime.update import part_of_leaves
from dflop_jax.runtime.zero_sharding import Box, ZeroSpec

TreeKey = tuple[str, str]  # segment, and "params" or "opt_state"


@dataclass(frozen=True)
class StateArray:
    """A leaf of a segment's "params" or "opt_state", and the array that it is a part of."""

    name: str
    segment: str
    kind: str
    leaf: int  # index in the flattened tree
    struct: jax.ShapeDtypeStruct
    cut: ZeroSpec  # how the data ranks shard the leaf
    rows: tuple[int, ...]  # rows of the array that this leaf holds
    n_rows: int | None  # rows of the array; None: the leaf is the whole array
    saves: bool  # False if another segment saves the same array

    @property
    def tree(self) -> TreeKey:
        return self.segment, self.kind

    @property
    def shape(self) -> tuple[int, ...]:
        shape = self.cut.full_shape(self.struct.shape)
        return shape if self.n_rows is None else (self.n_rows, *shape[1:])

    def boxes(self, index: tuple[slice, ...]) -> Iterator[tuple[Any, Box]]:
        """Yield the array's boxes that a shard holds, each with its position in the shard."""
        spans = self._spans(index)
        if self.n_rows is None:
            return self.cut.boxes(spans)
        return self.cut.layer_boxes(spans, self.rows)

    def is_first_replica(self, index: tuple[slice, ...]) -> bool:
        return self.cut.is_first_replica(self._spans(index))

    def _spans(self, index: tuple[slice, ...]) -> Box:
        return tuple(s.indices(n)[:2] for s, n in zip(index, self.struct.shape, strict=True))


def state_arrays(ex: Executor) -> list[StateArray]:
    """Return all processes' leaves of parameters and optimizer state, in a fixed order."""
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
    """Return every leaf of a segment's `initial_structs`, in order."""
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


def by_tree(arrays: Sequence[StateArray]) -> dict[TreeKey, list[StateArray]]:
    """Return the arrays of each tree, in the order of its leaves."""
    trees = groupby(arrays, key=lambda a: a.tree)
    return {key: [*of_tree] for key, of_tree in trees}


def saved_tree(ex: Executor, segment: str, kind: str) -> Any:
    """Return the tree whose leaves are those of `state_arrays`."""
    if kind == "params":
        return {**ex.state.params[segment], **ex.state.masters.get(segment, {})}
    return ex.state.opt_state[segment]


def saved_leaves(ex: Executor) -> dict[TreeKey, list[Any]]:
    """Return the leaves of every `saved_tree`."""
    trees = [(name, "params") for name in ex.programs.segments]
    trees += [(name, "opt_state") for name in ex.trainable]
    return {tree: jax.tree.leaves(saved_tree(ex, *tree)) for tree in trees}


def put_leaves(ex: Executor, segment: str, kind: str, leaves: Sequence[Any]) -> None:
    """Set the tree of `saved_tree`; `split_masters` is to follow."""
    if kind == "params":
        structs = initial_structs(ex.programs.segments[segment])
    else:
        structs = ex.programs.updates[segment].state_structs
    tree = jax.tree.unflatten(jax.tree.structure(structs), leaves)
    getattr(ex.state, kind)[segment] = tree


def split_masters(ex: Executor, *, reset_optimizer: bool = False) -> None:
    """Make the parameters that programs read, tied copies included, after `put_leaves`; runs
    collectives. With `reset_optimizer`, the optimizer state starts anew from the parameters."""
    state = ex.state
    for segment in ex.trainable:
        update = ex.programs.updates[segment]
        params = state.params[segment]
        if reset_optimizer and segment in ex.programs.local_segments:
            params, state.masters[segment], state.opt_state[segment] = update.init_state(params)
        else:
            params, state.masters[segment] = update.split_masters(params)
        state.params[segment] = params
    ex.share_tied()
