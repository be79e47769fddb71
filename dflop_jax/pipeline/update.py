"""The end of a step: one reduction of the gradients over ranks, then the optimizer.

Optimizer state is split over data ranks: the reduction scatters, the update runs on each rank's
piece. New parameters are gathered, or stay pieces where the parameters are split too (ZeRO 3).
Where programs hold parameters in another dtype, the optimizer's are float32 masters beside its
state, and what programs hold is made of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dflop_jax.contract import Array
from dflop_jax.pipeline import fused
from dflop_jax.pipeline.communicator import absent, is_local
from dflop_jax.pipeline.elementwise import Averaged, Elementwise, Optimizer, part_of_leaves
from dflop_jax.pipeline.held import (
    grad_structs,
    has_masters,
    held_struct,
    initial_structs,
    param_structs,
    program_structs,
    split_cuts,
)
from dflop_jax.pipeline.segment import Segment

Tree = Any
AVERAGE = "ema"  # the key of a state's average of the parameters


def _specs(structs: Tree) -> Tree:
    return jax.tree.map(lambda a: a.sharding.spec, structs)


class SegmentUpdate:
    """Reduce and update programs of one segment's trainable parameters.

    `rate_factors` multiply the steps of freeze groups; the optimizer's own rate holds for the rest.
    Where a tied parameter is read by another segment, that one reduces its gradient without
    counting it in the norm, and the owner (`adds_shared`) adds it to its own.
    """

    def __init__(
        self,
        segment: Segment,
        tx: Optimizer,
        clip_norm: float,
        rate_factors: Mapping[str, float] = MappingProxyType({}),
        *,
        adds_shared: bool = False,
    ):
        self.segment, self.clip_norm = segment, clip_norm
        self.adds_shared = adds_shared
        groups = segment.module.freeze_groups
        self._factors = {p: rate_factors.get(g, 1.0) for p, g in groups.items()}
        structs, cuts = program_structs(segment), split_cuts(segment)
        shapes = param_structs(segment)
        trained = [p for p in segment.parts if p in segment.trainable]
        self._trained = {p: structs[p] for p in trained}
        self._params = self._own(self._trained)
        self._cuts = {p: cuts[p] for p in trained}
        self._shards = {p: self._shard_structs(cuts[p], shapes[p]) for p in trained}
        initial = self._own(initial_structs(segment))
        self.master_structs = initial if has_masters(segment) else {}
        self._ema = tx if isinstance(tx, Averaged) else None
        stepping = tx.stepping if isinstance(tx, Averaged) else tx
        mine = self._own(self._cuts), self._own(self._shards)
        self._optimizer = Elementwise(segment, stepping, *mine)
        self.state_structs = self._with_average(self._optimizer.structs, mine[1])

    @property
    def shared(self) -> tuple[str, ...]:
        """Parts whose gradient another segment's update takes."""
        return tuple(p for p in self._trained if p not in self._params)

    def _own(self, by_part: Tree) -> Tree:
        own_parts = self.segment.own_parts
        return {p: tree for p, tree in by_part.items() if p in self._trained and p in own_parts}

    def _shard_structs(self, cuts: Tree, structs: Tree) -> Tree:
        return jax.tree.map(
            lambda cut, a: held_struct(self.segment, cut, a.shape, jnp.float32), cuts, structs
        )

    def _with_average(self, state: Tree, average: Tree) -> Tree:
        """The optimizer's state, beside the average of the parameters where there is one."""
        return {"tx": state, AVERAGE: average} if self._ema else state

    def state_cuts(self) -> Tree:
        """How each leaf of the state is cut."""
        return self._with_average(self._optimizer.cuts(), self._own(self._cuts))

    def state_parts(self) -> Tree:
        """The part whose parameters each leaf of the state belongs to; "" of no part."""
        return self._with_average(self._optimizer.parts(), part_of_leaves(self._params))

    def begin(self, initial: Tree) -> tuple[Tree, Tree, Tree]:
        """`held.initial_structs`' arrays -> (parameters that programs read, masters, fresh
        optimizer state)."""
        params, masters = self.take_masters(initial)

        def fresh(params: Tree) -> Tree:
            average = self._pieces(params) if self._ema and not masters else params
            return self._with_average(self._optimizer.fresh(), average)

        shardings = jax.tree.map(lambda a: a.sharding, self.state_structs)
        held = masters or {p: params[p] for p in self._params}
        state = jax.jit(fresh, out_shardings=shardings)(held if self._ema else {})
        if self._ema:
            _ = self._of_pieces  # compiled now, and not in the middle of a run
        return params, masters, state

    def take_masters(self, initial: Tree) -> tuple[Tree, Tree]:
        """(parameters that programs read, masters)."""
        if not self.master_structs:
            return initial, {}
        masters = self._own(initial)
        if not is_local(self.segment.mesh):
            return {**initial, **jax.tree.map(absent, self._params)}, masters

        return {**initial, **self._of_pieces(masters)}, masters

    def averaged(self, state: Tree) -> Tree:
        """What programs hold of the own parts where the average stands for the parameters; {}
        without one."""
        if not self._ema:
            return {}
        if not is_local(self.segment.mesh):
            return jax.tree.map(absent, self._params)
        return self._of_pieces(state[AVERAGE])

    @cached_property
    def _of_pieces(self) -> Callable[[Tree], Tree]:
        """Float32 shards of the own parts -> what programs hold."""
        whole = self._gather()

        def made(pieces: Tree) -> Tree:
            return whole(jax.tree.map(lambda m, a: m.astype(a.dtype), pieces, self._params))

        shardings = jax.tree.map(lambda a: a.sharding, self._params)
        pieces = self._own(self._shards)
        return jax.jit(made, out_shardings=shardings).lower(pieces).compile()

    def _gather(self) -> Callable[[Tree], Tree]:
        """Shards of the own parts -> what programs hold."""
        return fused.gather(self.segment.mesh, self._own(self._cuts), _specs(self._params))

    def _scalar(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), jnp.float32, sharding=self.segment.sharding())

    def shard_structs(self) -> Tree:
        """Reduced gradients, each data rank its piece; shared parts included."""
        return self._shards

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
            self.segment.mesh, _specs(grads), self._cuts, counted=tuple(self._params)
        )
        more = {"entry": shards["entry"]} if self.adds_shared else {}

        def reduce(grads: Tree, more: Tree) -> tuple[Tree, Array, Tree]:
            total, squares = add_up(grads, more)
            return total, squares, jax.tree.map(jnp.zeros_like, grads)

        outs = jax.tree.map(lambda a: a.sharding, self.reduced_structs())
        return jax.jit(reduce, out_shardings=outs, donate_argnums=0).lower(grads, more)

    def _pieces(self, params: Tree) -> Tree:
        """Each rank's pieces of what programs hold."""
        if self.segment.plan.zero == 3:
            return params
        cuts = self._own(self._cuts)
        shardings = jax.tree.map(lambda cut: self.segment.sharding(*cut.spec), cuts)
        held = jax.tree.map(lambda cut, a: cut.hold(a), cuts, params)
        return jax.lax.with_sharding_constraint(held, shardings)

    def lower_update(self, n_segments: int) -> jax.stages.Lowered:
        """(params, masters, state, gradient pieces, sums of squares of all segments, the most that
        these may add up to) -> (params, masters, state, what they add up to); params, masters and
        state donated. Where it is more than that, or not a number, all stay as they were: every
        device of every segment adds up the same numbers in the same order, so all decide alike.
        Each data rank makes new parameters of its piece only; these are gathered in the dtype that
        programs hold them in."""
        pieces, scalar = self._own(self.shard_structs()), self._scalar()
        whole = self._gather()

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
            mine = masters or self._pieces(params)
            tx_state = state["tx"] if self._ema else state
            updates, next_state = self._optimizer.update(grads, tx_state, mine)
            updates = {
                part: jax.tree.map(lambda u, f=self._factors[part]: u * f, tree)
                for part, tree in updates.items()
            }
            new = optax.apply_updates(mine, updates)
            if self._ema:
                average = self._ema.after(state[AVERAGE], new)
                next_state = self._with_average(next_state, average)
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
