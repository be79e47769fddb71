"""The end of a step: one reduction of the gradients over ranks, then the optimizer.

Optimizer state is split over data ranks: the reduction scatters, the update runs on each rank's
piece. New parameters are gathered, or stay pieces where the parameters are split too (ZeRO 3).
Where programs hold parameters in another dtype, the optimizer's are float32 masters beside its
state, and what programs hold is made of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from dflop_jax.contract import Array
from dflop_jax.pipeline import fused
from dflop_jax.pipeline.communicator import absent, is_local
from dflop_jax.pipeline.held import (
    grad_structs,
    has_masters,
    initial_structs,
    program_structs,
    split_specs,
)
from dflop_jax.pipeline.parts import STACKED
from dflop_jax.pipeline.segment import Segment

Tree = Any


def _specs(structs: Tree) -> Tree:
    return jax.tree.map(lambda a: a.sharding.spec, structs)


def in_layers(params: Tree) -> Tree:
    """Whether each leaf of a tree by parts belongs to the stacked layers."""
    return {p: jax.tree.map(lambda _, p=p: p in STACKED, tree) for p, tree in params.items()}


class SegmentUpdate:
    """Reduce and update programs of one segment's trainable parameters.

    `rate_factors` multiply the steps of freeze groups; the optimizer's own rate holds for the rest.
    Where a tied parameter is read by another segment, that one reduces its gradient without
    counting it in the norm, and the owner (`adds_shared`) adds it to its own.
    """

    def __init__(
        self,
        segment: Segment,
        tx: optax.GradientTransformation,
        clip_norm: float,
        rate_factors: Mapping[str, float] = MappingProxyType({}),
        *,
        adds_shared: bool = False,
    ):
        self.segment, self.tx, self.clip_norm = segment, tx, clip_norm
        self.adds_shared = adds_shared
        groups = segment.module.freeze_groups
        self._factors = {p: rate_factors.get(g, 1.0) for p, g in groups.items()}
        structs, split = program_structs(segment), split_specs(segment)
        trained = [p for p in segment.parts if p in segment.trainable]
        self._trained = {p: structs[p] for p in trained}
        self._params = self._own(self._trained)
        self._split = {p: split[p] for p in trained}
        initial = self._own(initial_structs(segment))
        self.master_structs = initial if has_masters(segment) else {}
        self.state_structs = self._state_structs(initial)

    @property
    def shared(self) -> tuple[str, ...]:
        """Parts whose gradient another segment's update takes."""
        return tuple(p for p in self._trained if p not in self._params)

    def _own(self, by_part: Tree) -> Tree:
        own_parts = self.segment.own_parts
        return {p: tree for p, tree in by_part.items() if p in self._trained and p in own_parts}

    def _state_structs(self, params: Tree) -> Tree:
        everywhere = self.segment.sharding()

        def sharded(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return optax.tree_utils.tree_map_params(
            self.tx,
            sharded,
            jax.eval_shape(self.tx.init, params),
            self._shardings(self._own(self._split)),
            transform_non_params=lambda leaf: sharded(leaf, everywhere),
        )

    def _shardings(self, specs: Tree) -> Tree:
        return jax.tree.map(lambda spec: self.segment.sharding(*spec), specs)

    def layered(self) -> Tree:
        """Whether each leaf of the state belongs to the stacked layers."""
        return optax.tree_utils.tree_map_params(
            self.tx,
            lambda _, layered: layered,
            self.state_structs,
            in_layers(self._params),
            transform_non_params=lambda _: False,
        )

    def begin(self, initial: Tree) -> tuple[Tree, Tree, Tree]:
        """`held.initial_structs`' arrays -> (parameters that programs read, masters, fresh
        optimizer state)."""
        params, masters = self.take_masters(initial)
        shardings = jax.tree.map(lambda a: a.sharding, self.state_structs)
        state = jax.jit(self.tx.init, out_shardings=shardings)(self._own(initial))
        return params, masters, state

    def take_masters(self, initial: Tree) -> tuple[Tree, Tree]:
        """(parameters that programs read, masters)."""
        if not self.master_structs:
            return initial, {}
        masters = self._own(initial)
        if not is_local(self.segment.mesh):
            return {**initial, **jax.tree.map(absent, self._params)}, masters

        def made(masters: Tree) -> Tree:
            return jax.tree.map(lambda m, a: m.astype(a.dtype), masters, self._params)

        shardings = jax.tree.map(lambda a: a.sharding, self._params)
        return {**initial, **jax.jit(made, out_shardings=shardings)(masters)}, masters

    def _scalar(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), jnp.float32, sharding=self.segment.sharding())

    def shard_structs(self) -> Tree:
        """Reduced gradients, each data rank its piece; shared parts included."""
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, jnp.float32, sharding=s),
            self._trained,
            self._shardings(self._split),
        )

    def reduced_structs(self) -> tuple[Tree, jax.ShapeDtypeStruct, Tree]:
        """Outputs of the reduction."""
        return self.shard_structs(), self._scalar(), grad_structs(self.segment)

    def updated_structs(self) -> tuple[Tree, Tree, Tree, jax.ShapeDtypeStruct]:
        """Outputs of the update."""
        return self._params, self.master_structs, self.state_structs, self._scalar()

    def lower_reduce(self) -> jax.stages.Lowered:
        """(grads of ranks, gradient shards of the shared part's reader) -> (gradient shards, sum of
        squares of the own parts, zeroed grads); grads donated. The reader's shards are {} but for
        the owner of a tied parameter."""
        grads, shards = grad_structs(self.segment), self.shard_structs()
        add_up = fused.sum_scatter(
            self.segment.mesh, _specs(grads), self._split, counted=tuple(self._params)
        )
        more = {"entry": shards["entry"]} if self.adds_shared else {}

        def reduce(grads: Tree, more: Tree) -> tuple[Tree, Array, Tree]:
            total, squares = add_up(grads, more)
            return total, squares, jax.tree.map(jnp.zeros_like, grads)

        outs = jax.tree.map(lambda a: a.sharding, self.reduced_structs())
        return jax.jit(reduce, out_shardings=outs, donate_argnums=0).lower(grads, more)

    def lower_update(self, n_segments: int) -> jax.stages.Lowered:
        """(params, masters, state, gradient pieces, sums of squares of all segments, the most that
        these may add up to) -> (params, masters, state, what they add up to); params, masters and
        state donated. Where it is more than that, or not a number, all stay as they were: every
        device of every segment adds up the same numbers in the same order, so all decide alike.
        Each data rank makes new parameters of its piece only; these are gathered in the dtype that
        programs hold them in."""
        pieces, scalar = self._own(self.shard_structs()), self._scalar()
        split = self._own(self._split)
        sharding = self._shardings(split)
        whole = fused.gather(self.segment.mesh, split, _specs(self._params))

        def update(
            params: Tree,
            masters: Tree,
            state: Tree,
            grads: Tree,
            squares: tuple[Array, ...],
            limit: Array,
        ) -> tuple[Tree, Tree, Tree, Array]:
            total = functools.reduce(jnp.add, squares)  # in an order that no compiler changes
            applies = total <= limit  # false for NaN
            if self.clip_norm > 0:
                norm = jnp.sqrt(total)
                factor = jnp.minimum(1.0, self.clip_norm / jnp.maximum(norm, 1e-16))
                grads = jax.tree.map(lambda g: g * factor.reshape((1,) * g.ndim), grads)
            mine = masters or jax.lax.with_sharding_constraint(params, sharding)
            # optax relies on implicit promotion, which the user may have forbidden.
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                updates, next_state = self.tx.update(grads, state, mine)
                updates = {
                    part: jax.tree.map(lambda u, f=self._factors[part]: u * f, tree)
                    for part, tree in updates.items()
                }
                new = optax.apply_updates(mine, updates)
            new, state = jax.tree.map(
                lambda n, old: jnp.where(applies, n, old), (new, next_state), (mine, state)
            )
            held = jax.tree.map(lambda n, a: n.astype(a.dtype), new, self._params)
            return whole(held), new if masters else {}, state, total

        outs = jax.tree.map(lambda a: a.sharding, self.updated_structs())
        # Parameters are donated also where the masters are read in their place.
        fn = jax.jit(update, out_shardings=outs, donate_argnums=(0, 1, 2), keep_unused=True)
        args = self._params, self.master_structs, self.state_structs, pieces
        return fn.lower(*args, (scalar,) * n_segments, scalar)
