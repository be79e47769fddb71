"""Structs and shardings of a segment's parameters and gradients on its submesh."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import Params, tensor_parallel_dim, working_dtype_of
from dflop_jax.runtime.module_parts import logical_axes, part_struct
from dflop_jax.runtime.segment import Segment
from dflop_jax.runtime.zero_sharding import ZeroSpec, make_zero_spec

MIN_SPLIT_ELEMENTS = 2**16  # of a layer, to sum its gradients in an array of its own


def param_structs(s: Segment) -> Params:
    """Return shapes and working dtypes of the segment's parameters, with layers stacked."""
    structs = {p: part_struct(s.module, p) for p in s.read_parts}
    for part, rows in s.layer_rows.items():
        lead = (len(rows),)
        structs[part] = jax.tree.map(
            lambda a, lead=lead: jax.ShapeDtypeStruct(lead + a.shape, a.dtype), structs[part]
        )
    return structs


def stored_structs(s: Segment, zero_specs: Params, float32: Collection[str] = ()) -> Params:
    """Return structs of parts as data ranks store them; parts in `float32` have that dtype."""

    def stored(part: str, a: jax.ShapeDtypeStruct, spec: ZeroSpec) -> jax.ShapeDtypeStruct:
        dtype = jnp.float32 if part in float32 else a.dtype
        sharding = s.sharding(*spec.spec)
        return jax.ShapeDtypeStruct(spec.stored_shape(a.shape), dtype, sharding=sharding)

    return _map_parts(stored, zero_specs, param_structs(s), zero_specs)


def _map_parts(function: Callable[..., Any], parts: Iterable[str], *trees: Params) -> Params:
    """Return `function(part, *leaves)` for every leaf of these parts."""
    return {
        part: jax.tree.map(partial(function, part), *(tree[part] for tree in trees))
        for part in parts
    }


def program_structs(s: Segment) -> Params:
    """Return structs of the parameters that programs read."""
    return stored_structs(s, param_zero_specs(s))


def owned_param_structs(s: Segment) -> Params:
    """Return `program_structs` of the segment's owned parts."""
    structs = program_structs(s)
    return {part: structs[part] for part in s.owned_parts}


def master_parts(s: Segment) -> frozenset[str]:
    """Return the parts that have float32 masters beside the parameters that programs read."""
    return frozenset() if working_dtype_of(s.module) == jnp.float32 else s.trainable


def initial_structs(s: Segment) -> Params:
    """Return structs of the owned parts as drawn and saved: of masters if there are any."""
    return stored_structs(s, initial_zero_specs(s), float32=master_parts(s))


def initial_zero_specs(s: Segment) -> Params:
    """Return the `ZeroSpec` of each leaf of `initial_structs`."""
    masters, of_state, of_params = master_parts(s), state_zero_specs(s), param_zero_specs(s)
    return {p: (of_state if p in masters else of_params)[p] for p in s.owned_parts}


def param_specs(s: Segment) -> Params:
    """Return how parameters are sharded over stages and tensor ranks, without data sharding.

    Raises:
      ValueError: a degree does not divide a dim.
    """

    def spec(part: str, leaf: jax.ShapeDtypeStruct, axes: tuple[Any, ...]) -> P:
        split = tensor_parallel_dim(leaf.shape, axes, s.tp)
        lead = ("stage",) if part in s.stacked else ()
        return P(*lead, *("model" if i == split else None for i in range(len(axes))))

    layers = {part: part_struct(s.module, part) for part in s.read_parts}
    axes = {part: logical_axes(s.module, part) for part in s.read_parts}
    specs = _map_parts(spec, s.read_parts, layers, axes)
    jax.tree.map_with_path(partial(_check_degree_divides, s), param_structs(s), specs)
    return specs


def _check_degree_divides(s: Segment, path: Any, leaf: jax.ShapeDtypeStruct, spec: P) -> None:
    for size, axis in zip(leaf.shape, spec, strict=False):
        degree = s.mesh.shape[axis] if axis else 1
        if size % degree:
            raise ValueError(
                f"segment {s.plan.name!r}: dim {size} of {jax.tree_util.keystr(path)} does "
                f"not divide by the degree {axis}={degree}; choose one that divides it"
            )


def state_zero_specs(s: Segment) -> Params:
    """Return the `ZeroSpec` of optimizer state, of ZeRO 2's gradients and ZeRO 3's parameters."""
    dp = int(s.plan.shard_ranks(s.data_ranks, s.tp))
    sizes = {"dp": dp, "tp": s.tp, "n_replicas": s.data_ranks // dp}

    def zero_spec(part: str, leaf: jax.ShapeDtypeStruct, spec: P) -> ZeroSpec:
        return make_zero_spec(leaf, spec, stacked=part in s.stacked, **sizes)

    return _map_parts(zero_spec, s.read_parts, param_structs(s), param_specs(s))


def param_zero_specs(s: Segment) -> Params:
    """Return the `ZeroSpec` of the parameters that programs read."""
    return state_zero_specs(s) if s.plan.zero == 3 else _replicated_zero_specs(s)


def _replicated_zero_specs(s: Segment) -> Params:
    return jax.tree.map(lambda spec: ZeroSpec(spec, spec), param_specs(s))


def grad_structs(s: Segment) -> Params:
    """Return structs of the float32 accumulators: of `stacked_grad_structs`, but a tuple of stacks
    of one layer for large arrays if the segment `sums_by_layer`."""

    def split(a: jax.ShapeDtypeStruct) -> Any:
        ranks, n_layers, *shape = a.shape
        if prod(shape) < MIN_SPLIT_ELEMENTS:
            return a
        return (jax.ShapeDtypeStruct((ranks, 1, *shape), a.dtype, sharding=a.sharding),) * n_layers

    structs = stacked_grad_structs(s)
    split_parts = structs.keys() & s.stacked.keys() if s.sums_by_layer else ()
    return structs | {part: jax.tree.map(split, structs[part]) for part in split_parts}


def stack_gradients(s: Segment, grads: Params) -> Params:
    """Return accumulators of `grad_structs` as those of `stacked_grad_structs`."""

    def stack(_: Any, grad: Any) -> Any:
        return jnp.concatenate(grad, axis=1) if isinstance(grad, tuple) else grad

    return jax.tree.map(stack, stacked_grad_structs(s), grads)


def stacked_grad_structs(s: Segment) -> Params:
    """Return structs of the float32 accumulators with layers stacked. Their leading dim counts
    ranks to sum at the step's end: stages for entry and exit, and data ranks unless each holds its
    shard of the sum."""

    def accumulator(
        part: str, leaf: jax.ShapeDtypeStruct, zero_spec: ZeroSpec
    ) -> jax.ShapeDtypeStruct:
        ranks = () if part in s.stacked else ("stage",)
        ranks = ranks if zero_spec.is_split else ("data", *ranks)
        lead = ranks if len(ranks) > 1 else ranks[0] if ranks else None
        shape = (prod(s.mesh.shape[axis] for axis in ranks), *zero_spec.stored_shape(leaf.shape))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=s.sharding(lead, *zero_spec.spec))

    zero_specs = state_zero_specs(s) if s.plan.zero >= 2 else _replicated_zero_specs(s)
    parts = [part for part in s.read_parts if part in s.trainable]
    return _map_parts(accumulator, parts, param_structs(s), zero_specs)
