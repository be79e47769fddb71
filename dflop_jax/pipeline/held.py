"""How a segment's parameters, and the gradients of those that train, are held on its submesh."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import Array, Module, Params, split_dim, working_dtype_of
from dflop_jax.pipeline.fused import axes_of, data_dim
from dflop_jax.pipeline.pieces import STACKED
from dflop_jax.pipeline.shards import split_spec
from dflop_jax.records import SegmentPlan

KEY_IMPL = "rbg"  # of the keys of fresh parameters: compiles several times faster than threefry


class HeldParameters(ABC):
    """What `Segment` says of parameters, from its plan, module, mesh and parts."""

    plan: SegmentPlan
    module: Module
    mesh: Mesh
    trainable: frozenset[str]

    @property
    @abstractmethod
    def own_parts(self) -> tuple[str, ...]: ...

    @property
    @abstractmethod
    def parts(self) -> tuple[str, ...]: ...

    def sharding(self, *spec: Any) -> NamedSharding:
        return NamedSharding(self.mesh, P(*spec))

    def param_structs(self) -> Params:
        """Shapes and working dtypes of the segment's parameters, layers stacked."""

        def stacked(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.plan.n_layers, *leaf.shape), leaf.dtype)

        structs = {p: self._part_struct(p) for p in self.parts}
        return {p: jax.tree.map(stacked, s) if p in STACKED else s for p, s in structs.items()}

    def program_structs(self) -> Params:
        """`param_structs` with their shardings: what programs read."""
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self.sharding(*s)),
            self.param_structs(),
            self.held_specs(),
        )

    def placed_structs(self) -> Params:
        """`program_structs` of the segment's own parts."""
        structs = self.program_structs()
        return {part: structs[part] for part in self.own_parts}

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer keeps float32 masters of what trains, beside what programs read."""
        return working_dtype_of(self.module) != jnp.float32

    def initial_structs(self) -> Params:
        """The segment's own parts as they are drawn, read and saved: masters of what trains, if
        it has them, split over data ranks; all else as programs read it."""
        placed, specs = self.placed_structs(), self.split_specs()

        def master(a: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(a.shape, jnp.float32, sharding=self.sharding(*spec))

        return {
            part: jax.tree.map(master, tree, specs[part])
            if self.has_masters and part in self.trainable
            else tree
            for part, tree in placed.items()
        }

    def _part_struct(self, part: str) -> Params:
        return part_struct(self.module, part)

    def param_specs(self) -> Params:
        """How parameters are sharded over stages and tensor ranks; whole on every data rank."""
        ways = self.mesh.shape["model"]

        def spec(lead: tuple[str, ...], leaf: jax.ShapeDtypeStruct, axes: tuple[Any, ...]) -> P:
            split = split_dim(leaf.shape, axes, ways)
            return P(*lead, *("model" if i == split else None for i in range(len(axes))))

        specs = {
            part: jax.tree.map(
                partial(spec, ("stage",) if part in STACKED else ()),
                self._part_struct(part),
                _logical_axes(self.module, part),
            )
            for part in self.parts
        }
        jax.tree.map_with_path(self._check_divides, self.param_structs(), specs)
        return specs

    def _check_divides(self, path: Any, leaf: jax.ShapeDtypeStruct, spec: P) -> None:
        for size, axis in zip(leaf.shape, spec, strict=False):
            ways = self.mesh.shape[axis] if axis else 1
            if size % ways:
                raise ValueError(
                    f"segment {self.plan.name!r}: dim {size} of {jax.tree_util.keystr(path)} does "
                    f"not divide over {axis}={ways}; choose a degree that divides it"
                )

    def split_specs(self) -> Params:
        """`param_specs`, and over data ranks: of optimizer state, of gradients from ZeRO 2 on, of
        parameters in ZeRO 3."""
        split = partial(split_spec, ways=self.mesh.shape["data"])
        return jax.tree.map(split, self.param_structs(), self.param_specs())

    def held_specs(self) -> Params:
        """How the parameters that programs read are sharded."""
        return self.split_specs() if self.plan.zero == 3 else self.param_specs()

    def grad_specs(self) -> Params:
        """Of the accumulators. Their leading dim keeps ranks apart that are added up at the step's
        end: stages, of the ends, and data ranks, unless each has its piece of their sum."""

        def accumulator(lead: tuple[str, ...], whole: P, split: P) -> P:
            if self.plan.zero >= 2 and data_dim(split) >= 0:
                lead, whole = lead[1:], split
            return P(lead if len(lead) > 1 else lead[0] if lead else None, *whole)

        whole, split = self.param_specs(), self.split_specs()
        return {
            part: jax.tree.map(
                partial(accumulator, ("data",) if part in STACKED else ("data", "stage")),
                whole[part],
                split[part],
            )
            for part in self.parts
            if part in self.trainable
        }

    def grad_structs(self) -> Params:
        """Float32 accumulators, sharded by `grad_specs`."""

        def accumulator(leaf: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
            lead = prod(self.mesh.shape[axis] for axis in axes_of(spec[0]))
            shape = (lead, *leaf.shape)
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.sharding(*spec))

        structs, specs = self.param_structs(), self.grad_specs()
        return {part: jax.tree.map(accumulator, structs[part], specs[part]) for part in specs}


@partial(jax.jit, static_argnums=(0, 1))
def init_part(module: Module, part: str, key: Array) -> Params:
    """Fresh parameters of a part of a module, of one layer for "layers"."""
    return module.init(part, key)


def init_structs(module: Module, part: str) -> Params:
    """Shapes and dtypes of `init_part`, which then is not traced again where it runs."""
    return init_part.eval_shape(module, part, jax.random.key(0, impl=KEY_IMPL))


# What follows is asked for again and again, for every segment, shape and program.


@lru_cache(maxsize=256)
def part_struct(module: Module, part: str) -> Params:
    """A part, or one layer of it, as the module's functions are given it."""

    def working(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        dtype = working_dtype_of(module) if is_float else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    return jax.tree.map(working, init_structs(module, part))


@lru_cache(maxsize=256)
def _logical_axes(module: Module, part: str) -> Params:
    return module.logical_axes(part)
