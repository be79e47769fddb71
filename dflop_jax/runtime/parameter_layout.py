"""How a segment's parameters, and the gradients of those that train, are held on its submesh."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import Params, split_dim, working_dtype_of
from dflop_jax.runtime.module_parts import logical_axes, part_struct
from dflop_jax.runtime.segment import Segment
from dflop_jax.runtime.zero_sharding import Cut, cut_over


def param_structs(s: Segment) -> Params:
    """Shapes and working dtypes of the segment's parameters, layers stacked."""

    def stacked(n: int, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((n, *leaf.shape), leaf.dtype)

    structs = {p: part_struct(s.module, p) for p in s.parts}
    every = {p: jax.tree.map(partial(stacked, len(r)), structs[p]) for p, r in s.held_rows.items()}
    return {**structs, **every}


def program_structs(s: Segment) -> Params:
    """`param_structs` with their shardings: what programs read."""
    return jax.tree.map(
        lambda a, cut: held_struct(s, cut, a.shape, a.dtype), param_structs(s), held_cuts(s)
    )


def held_struct(s: Segment, cut: Cut, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """What the segment's devices hold of an array of a shape that is cut so."""
    return jax.ShapeDtypeStruct(cut.held_shape(shape), dtype, sharding=s.sharding(*cut.spec))


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
    structs, cuts = param_structs(s), initial_cuts(s)
    return {
        part: jax.tree.map(
            lambda a, cut, p=part: held_struct(
                s, cut, a.shape, jnp.float32 if _is_master(s, p) else a.dtype
            ),
            structs[part],
            cuts[part],
        )
        for part in s.own_parts
    }


def initial_cuts(s: Segment) -> Params:
    """How `initial_structs` are cut."""
    split, held = split_cuts(s), held_cuts(s)
    return {p: split[p] if _is_master(s, p) else held[p] for p in s.own_parts}


def _is_master(s: Segment, part: str) -> bool:
    return has_masters(s) and part in s.trainable


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
            partial(spec, ("stage",) if part in s.stacked else ()),
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


def split_cuts(s: Segment) -> Params:
    """How data ranks share optimizer state, gradients from ZeRO 2 on, and parameters in ZeRO 3."""
    structs, specs = param_structs(s), param_specs(s)
    shards = int(s.plan.shard_ranks(s.data_ranks, s.mesh.shape["model"]))
    degrees = {"data": shards, "model": s.mesh.shape["model"], "copies": s.data_ranks // shards}
    return {
        part: jax.tree.map(
            partial(cut_over, stacked=part in s.stacked, **degrees), structs[part], specs[part]
        )
        for part in s.parts
    }


def held_cuts(s: Segment) -> Params:
    """How the parameters that programs read are cut."""
    return split_cuts(s) if s.plan.zero == 3 else _uncut(s)


def _uncut(s: Segment) -> Params:
    return jax.tree.map(lambda spec: Cut(spec, spec), param_specs(s))


def grad_structs(s: Segment) -> Params:
    """Float32 accumulators. Their leading dim keeps ranks apart that are added up at the step's
    end: stages, of the ends, and data ranks, unless each has its piece of their sum."""

    def accumulator(
        ranks: tuple[str, ...], leaf: jax.ShapeDtypeStruct, cut: Cut
    ) -> jax.ShapeDtypeStruct:
        ranks = ranks if cut.is_split else ("data", *ranks)
        lead = ranks if len(ranks) > 1 else ranks[0] if ranks else None
        shape = (prod(s.mesh.shape[axis] for axis in ranks), *cut.held_shape(leaf.shape))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=s.sharding(lead, *cut.spec))

    structs, cuts = param_structs(s), split_cuts(s) if s.plan.zero >= 2 else _uncut(s)
    return {
        part: jax.tree.map(
            partial(accumulator, () if part in s.stacked else ("stage",)), structs[part], cuts[part]
        )
        for part in s.parts
        if part in s.trainable
    }
