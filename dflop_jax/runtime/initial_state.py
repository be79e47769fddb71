"""Makes initial parameters and zero gradients of a segment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflop_jax.contract import ADAPTER, Array, Params, n_stacked_layers, stacked_parts, taps_of
from dflop_jax.runtime.communicator import index_key
from dflop_jax.runtime.module_parts import UNIFORM_MODULE_PARTS, init_part
from dflop_jax.runtime.parameter_layout import grad_structs, initial_structs, initial_zero_specs
from dflop_jax.runtime.segment import Segment
from dflop_jax.runtime.zero_sharding import ZeroSpec


def draw_parameters(segment: Segment, key: Array) -> Params:
    """Draw parameters of `initial_structs`; a layer gets the same values in any plan. One program
    for all plans draws one layer at a time, and the process keeps only its shards of it."""
    structs, zero_specs = initial_structs(segment), initial_zero_specs(segment)
    params = {}
    for part, part_key in _part_keys(segment, key):
        keys = _row_keys(segment, part, part_key) if part in segment.stacked else [part_key]
        shards = jax.tree.map(_LocalShards, structs[part], zero_specs[part])
        for row, row_key in enumerate(keys):
            drawn = init_part(segment.module, part, row_key)
            jax.tree.map(lambda s, a, row=row: s.add(row, np.asarray(a)), shards, drawn)
        params[part] = jax.tree.map(_LocalShards.assemble, shards)
    return params


class _LocalShards:
    """This process's shards of a parameter that arrives row by row or as a whole."""

    def __init__(self, struct: jax.ShapeDtypeStruct, zero_spec: ZeroSpec):
        self._struct, self._zero_spec = struct, zero_spec
        indices = struct.sharding.addressable_devices_indices_map(struct.shape).values()
        self._indices = {index_key(index): index for index in indices}
        self._rows: dict[Any, list[np.ndarray]] = {key: [] for key in self._indices}

    def add(self, row: int, array: np.ndarray) -> None:
        stored = self._zero_spec.to_stored(array)
        n_rows, is_row = self._struct.shape[0], stored.ndim < len(self._struct.shape)
        for key, index in self._indices.items():
            if not is_row:
                self._rows[key].append(stored[index].astype(self._struct.dtype))
            elif row in range(n_rows)[index[0]]:
                self._rows[key].append(stored[index[1:]].astype(self._struct.dtype)[None])

    def assemble(self) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            first, *rest = self._rows[index_key(index)]
            return np.concatenate([first, *rest]) if rest else first

        return jax.make_array_from_callback(self._struct.shape, self._struct.sharding, shard)


def zero_gradients(segment: Segment) -> Params:
    """Return zero gradient accumulators of `grad_structs`."""
    structs, tree = jax.tree.flatten(grad_structs(segment))
    return jax.tree.unflatten(tree, _zeros_program(tuple(structs))())


def _part_keys(segment: Segment, key: Array) -> Iterator[tuple[str, Array]]:
    """Yield (part, key); the keys depend on the model, not on the plan."""
    module = segment.module
    standard_parts = (*UNIFORM_MODULE_PARTS, ADAPTER, *sorted(taps_of(module)))
    more_parts = (*sorted(stacked_parts(module)), *sorted(module.freeze_groups))
    names = list(dict.fromkeys((*standard_parts, *more_parts)))
    for part in segment.owned_parts:
        yield part, jax.random.fold_in(key, names.index(part))


def _row_keys(segment: Segment, part: str, key: Array) -> Array:
    """Return the key of each stored row of a stacked part."""
    keys = jax.random.split(key, n_stacked_layers(segment.module, part))
    return keys[np.array(segment.layer_rows[part])]


@lru_cache(maxsize=64)
def _zeros_program(structs: tuple[jax.ShapeDtypeStruct, ...]) -> Callable[[], tuple[Array, ...]]:
    def zeros() -> tuple[Array, ...]:
        return tuple(jnp.zeros(a.shape, a.dtype) for a in structs)

    return jax.jit(zeros, out_shardings=tuple(a.sharding for a in structs))
