"""How a segment's parameters, and the gradients of those that train, are held on its submesh."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import Params, split_dim, working_dtype_of
from dflop_jax.pipeline.fused import axes_of, data_dim
from dflop_jax.pipeline.parts import STACKED, logical_axes, part_struct
from dflop_jax.pipeline.segment import Segment
from dflop_jax.pipeline.shards import split_spec


def param_structs(s: Segment) -> Params:
    """Shapes and working dtypes of the segment's parameters, layers stacked."""

    def stacked(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((s.plan.n_layers, *leaf.shape), leaf.dtype)

    structs = {p: part_struct(s.module, p) for p in s.parts}
    return {p: jax.tree.map(stacked, tree) if p in STACKED else tree for p, tree in structs.items()}


def program_structs(s: Segment) -> Params:
    """`param_structs` with their shardings: what programs read."""
    return jax.tree.map(
        lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s.sharding(*spec)),
        param_structs(s),
        held_specs(s),
    )


def placed_structs(s: Segment) -> Params:
    """`program_structs` of the segment's own parts."""
    structs = program_structs(s)
    return {part: structs[part] for part in s.own_parts}


def has_masters(s: Segment) -> bool:
    """Whether the optimizer keeps float32 masters of what trains, beside what programs read."""
    return working_dtype_of(s.module) != jnp.float32


def initial_structs(s: Segment) -> Params:
    """The segment's own parts as they are drawn, read and saved: masters of what trains, if it has
    them, split over data ranks; all else as programs read it."""
    placed, specs = placed_structs(s), split_specs(s)

    def master(a: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(a.shape, jnp.float32, sharding=s.sharding(*spec))

    return {
        part: jax.tree.map(master, tree, specs[part])
        if has_masters(s) and part in s.trainable
        else tree
        for part, tree in placed.items()
    }


def param_specs(s: Segment) -> Params:
    """How parameters are sharded over stages and tensor ranks; whole on every data rank.

    Raises:
      ValueError: a degree does not divide a dim.
    """
    ways = s.mesh.shape["model"]

    def spec(lead: tuple[str, ...], leaf: jax.ShapeDtypeStruct, axes: tuple[Any, ...]) -> P:
        split = split_dim(leaf.shape, axes, ways)
        return P(*lead, *("model" if i == split else None for i in range(len(axes))))

    specs = {
        part: jax.tree.map(
            partial(spec, ("stage",) if part in STACKED else ()),
            part_struct(s.module, part),
            logical_axes(s.module, part),
        )
        for part in s.parts
    }
    jax.tree.map_with_path(partial(_check_divides, s), param_structs(s), specs)
    return specs


def _check_divides(s: Segment, path: Any, leaf: jax.ShapeDtypeStruct, spec: P) -> None:
    for size, axis in zip(leaf.shape, spec, strict=False):
        ways = s.mesh.shape[axis] if axis else 1
        if size % ways:
            raise ValueError(
                f"segment {s.plan.name!r}: dim {size} of {jax.tree_util.keystr(path)} does "
                f"not divide over {axis}={ways}; choose a degree that divides it"
            )


def split_specs(s: Segment) -> Params:
    """`param_specs`, and over data ranks: of optimizer state, of gradients from ZeRO 2 on, of
    parameters in ZeRO 3."""
    split = partial(split_spec, ways=s.mesh.shape["data"])
    return jax.tree.map(split, param_structs(s), param_specs(s))


def held_specs(s: Segment) -> Params:
    """How the parameters that programs read are sharded."""
    return split_specs(s) if s.plan.zero == 3 else param_specs(s)


def grad_specs(s: Segment) -> Params:
    """The specs of the accumulators. Their leading dim keeps ranks apart that are added up at the
    step's end: stages, of the ends, and data ranks, unless each has its piece of their sum."""

    def accumulator(lead: tuple[str, ...], whole: P, split: P) -> P:
        if s.plan.zero >= 2 and data_dim(split) >= 0:
            lead, whole = lead[1:], split
        return P(lead if len(lead) > 1 else lead[0] if lead else None, *whole)

    whole, split = param_specs(s), split_specs(s)
    return {
        part: jax.tree.map(
            partial(accumulator, ("data",) if part in STACKED else ("data", "stage")),
            whole[part],
            split[part],
        )
        for part in s.parts
        if part in s.trainable
    }


def grad_structs(s: Segment) -> Params:
    """Float32 accumulators, sharded by `grad_specs`."""

    def accumulator(leaf: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
        lead = prod(s.mesh.shape[axis] for axis in axes_of(spec[0]))
        shape = (lead, *leaf.shape)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=s.sharding(*spec))

    structs, specs = param_structs(s), grad_specs(s)
    return {part: jax.tree.map(accumulator, structs[part], specs[part]) for part in specs}
