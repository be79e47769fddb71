"""Initial parameters and zero gradients, made on the devices of a segment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import ADAPTER, Array, Params, n_stacked_layers, stacked_parts, taps_of
from dflop_jax.records import MANUAL_AXES
from dflop_jax.runtime.communicator import shard_array
from dflop_jax.runtime.lowering import manual_spec
from dflop_jax.runtime.module_parts import UNIFORM_MODULE_PARTS, init_part
from dflop_jax.runtime.parameter_layout import grad_structs, initial_structs, initial_zero_specs
from dflop_jax.runtime.segment import Segment
from dflop_jax.runtime.zero_sharding import data_axis_dim


def draw_parameters(segment: Segment, key: Array) -> Params:
    """Fresh parameters of `initial_structs`; a layer has the same parameters in any plan."""
    on_host = segment.mesh.devices.flat[0].platform == "cpu"
    return (draw_on_host if on_host else draw_on_devices)(segment, key)


def draw_on_devices(segment: Segment, key: Array) -> Params:
    """Draw parameters by one program of the segment: every device draws its shards."""
    data = shard_array(np.asarray(jax.random.key_data(key)), segment.sharding())
    return _draw_program(segment, jax.random.key_impl(key))(data)


def draw_on_host(segment: Segment, key: Array) -> Params:
    """Draw parameters part by part and layer by layer on the host. Used on CPU devices: one program
    of a part serves every mesh, whereas one of a whole segment takes seconds to compile."""
    module, params = segment.module, {}
    for part, part_key in _part_keys(segment, key):
        if part in segment.stacked:
            keys = _row_keys(segment, part, part_key)
            layers = [jax.tree.map(np.asarray, init_part(module, part, k)) for k in keys]
            params[part] = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
        else:
            params[part] = jax.tree.map(np.asarray, init_part(module, part, part_key))
    return jax.tree.map(
        lambda a, zero_spec, s: shard_array(zero_spec.to_stored(a).astype(s.dtype), s.sharding),
        params,
        initial_zero_specs(segment),
        initial_structs(segment),
    )


def zero_gradients(segment: Segment) -> Params:
    """Fresh accumulators: `grad_structs`."""
    return _zeros_program(segment)()


def _part_keys(segment: Segment, key: Array) -> Iterator[tuple[str, Array]]:
    """The key of each part; it depends on the model only, never on the plan."""
    module = segment.module
    standard_parts = (*UNIFORM_MODULE_PARTS, ADAPTER, *sorted(taps_of(module)))
    more_parts = (*sorted(stacked_parts(module)), *sorted(module.freeze_groups))
    names = list(dict.fromkeys((*standard_parts, *more_parts)))
    for part in segment.owned_parts:
        yield part, jax.random.fold_in(key, names.index(part))


def _row_keys(segment: Segment, part: str, key: Array) -> Array:
    """The key of each stored row of a stacked part."""
    keys = jax.random.split(key, n_stacked_layers(segment.module, part))
    return keys[np.array(segment.layer_rows[part])]


@lru_cache(maxsize=64)
def _zeros_program(segment: Segment) -> Callable[[], Params]:
    structs = grad_structs(segment)

    def zeros() -> Params:
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), structs)

    return jax.jit(zeros, out_shardings=jax.tree.map(lambda a: a.sharding, structs))


@lru_cache(maxsize=64)
def _draw_program(segment: Segment, impl: Any) -> Callable[[Array], Params]:
    """The program that draws parameters from the data of a key."""

    structs, zero_specs = initial_structs(segment), initial_zero_specs(segment)

    def draw(data: Array) -> Params:
        key, params = jax.random.wrap_key_data(data, impl=impl), {}
        for part, part_key in _part_keys(segment, key):
            if part in segment.stacked:
                params[part] = _draw_layers(
                    segment, part, part_key, structs[part], zero_specs[part]
                )
            else:
                drawn = segment.module.init(part, part_key)
                params[part] = jax.tree.map(
                    lambda a, zero_spec, s: zero_spec.to_stored(a).astype(s.dtype),
                    drawn,
                    zero_specs[part],
                    structs[part],
                )
        return params

    return jax.jit(draw, out_shardings=jax.tree.map(lambda a: a.sharding, structs))


def _draw_layers(
    segment: Segment, part: str, key: Array, structs: Params, zero_specs: Params
) -> Params:
    """A part of the segment's layers, each from its own key. Every stage draws its layers one after
    the other, since a vectorised draw would give other values; a data rank keeps its shard of
    each."""
    dp = segment.data_ranks
    keys = _row_keys(segment, part, key)
    # Traced out here: a library's annotations could take the manual mesh for their own.
    one = jax.make_jaxpr(partial(segment.module.init, part))(keys[0])
    flat, tree = jax.tree.flatten(structs)
    by_leaf = jax.tree.leaves(zero_specs)

    def draw(key: Array) -> list[Array]:
        rank_shards, rank = [], jax.lax.axis_index("data")
        for drawn, zero_spec, struct in zip(jaxpr_as_fun(one)(key), by_leaf, flat, strict=True):
            array = zero_spec.to_stored(drawn)
            if zero_spec.is_split:
                dim = data_axis_dim(zero_spec.spec) - 1  # without that of layers
                size = array.shape[dim] // dp
                array = jax.lax.dynamic_slice_in_dim(array, rank * size, size, dim)
            rank_shards.append(array.astype(struct.dtype))
        return rank_shards

    on_ranks: Any = jax.shard_map(
        lambda keys: jax.lax.map(draw, keys),
        mesh=segment.mesh,
        in_specs=P("stage"),
        out_specs=[manual_spec(struct) for struct in flat],
        axis_names=set(MANUAL_AXES),
        check_vma=False,
    )
    return jax.tree.unflatten(tree, on_ranks(keys))
