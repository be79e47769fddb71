"""The end of a step: one reduction of the gradients over ranks, then the optimizer.

Optimizer state is split over data ranks: the reduction scatters, the update runs on each rank's
piece. New parameters are gathered, or stay pieces where the parameters are split too (ZeRO 3).
Where programs hold parameters in another dtype, the optimizer's are float32 masters beside its
state, and what programs hold is made of them.

The optimizer looks at single elements, on whatever a segment's devices hold of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import Array, float32_names_of
from dflop_jax.runtime import shards
from dflop_jax.runtime.communicator import absent, is_local
from dflop_jax.runtime.parameter_layout import (
    grad_structs,
    has_masters,
    held_struct,
    initial_structs,
    param_structs,
    program_structs,
    split_cuts,
)
from dflop_jax.runtime.segment import Segment
from dflop_jax.runtime.zero_sharding import Cut

Tree = Any
AVERAGE = "ema"  # the key of a state's average of the parameters
NO_PART = ""  # of what belongs to no parameter, such as a count of steps
_WHOLE = Cut(P(), P())


@dataclass(frozen=True)
class Averaged:
    """An optimizer that also keeps an average of the parameters after its steps, of which `decay`
    stays at every step. It is used as optax's are."""

    stepping: optax.GradientTransformation
    decay: float

    def init(self, params: Tree) -> Tree:
        return {"tx": self.stepping.init(params), AVERAGE: params}

    def update(self, grads: Tree, state: Tree, params: Tree, **more: Any) -> tuple[Tree, Tree]:
        """A parameter that no step changes is its average bit for bit, also where it is infinite,
        as bounds that bound nothing are."""
        updates, stepped = self.stepping.update(grads, state["tx"], params, **more)

        def one(old: Array, new: Array) -> Array:
            return jnp.where(old == new, new, new + self.decay * (old - new))

        average = jax.tree.map(one, state[AVERAGE], optax.apply_updates(params, updates))
        return updates, {"tx": stepped, AVERAGE: average}


# It may look at no element but the one that it steps: devices hold pieces of parameters.
Optimizer: TypeAlias = "optax.GradientTransformation | Averaged"


def map_state(
    of_params: Callable[[Tree], Tree], of_other: Callable[[Any], Any], state: Tree, params: Tree
) -> Tree:
    """An optimizer's state with `of_params` of every subtree that is shaped like `params`, such as
    moments, and `of_other` of every other leaf, such as a count."""
    shape: Any = jax.tree.structure(params)

    def is_like(node: Any) -> bool:
        return bool(jax.tree.structure(node) == shape)

    return jax.tree.map(
        lambda node: of_params(node) if is_like(node) else of_other(node), state, is_leaf=is_like
    )


def part_of_leaves(params: Tree) -> Tree:
    """The part of each leaf of a tree by parts."""
    return {p: jax.tree.map(lambda _, p=p: p, tree) for p, tree in params.items()}


class SegmentUpdate:
    """Reduce and update programs of one segment's trainable parameters.

    `rate_factors` multiply the steps of freeze groups; the optimizer's own rate holds for the rest.
    Where a tied parameter is read by another segment, that one reduces its gradient without
    counting it in the norm, and the owner (`adds_shared`) adds it to its own.

    Attributes:
      shard_structs: reduced gradients, each data rank its piece; shared parts included.
      shared: parts whose gradient another segment's update takes.
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
        trained = [p for p in segment.parts if p in segment.trainable]
        self.shared = tuple(p for p in trained if p not in segment.own_parts)
        cuts, shapes = split_cuts(segment), param_structs(segment)
        self._cuts = {p: cuts[p] for p in trained}
        self.shard_structs = {
            p: jax.tree.map(
                lambda cut, a: held_struct(segment, cut, a.shape, jnp.float32), cuts[p], shapes[p]
            )
            for p in trained
        }
        self._params = self._own(program_structs(segment))
        self.master_structs = self._own(initial_structs(segment)) if has_masters(segment) else {}
        self._averages = isinstance(tx, Averaged)
        scaled = partial(_scaled, segment, rate_factors)
        self._tx = (
            replace(tx, stepping=scaled(tx.stepping)) if isinstance(tx, Averaged) else scaled(tx)
        )
        everywhere, mine = segment.sharding(), self._own(self.shard_structs)

        def placed(leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        self.state_structs = map_state(
            lambda like: jax.tree.map(lambda a, s: placed(a, s.sharding), like, mine),
            lambda leaf: placed(leaf, everywhere),
            jax.eval_shape(self._tx.init, mine),
            mine,
        )

    def _own(self, by_part: Tree) -> Tree:
        """Of what trains, the segment's own parts."""
        s = self.segment
        return {p: t for p, t in by_part.items() if p in s.trainable and p in s.own_parts}

    def state_cuts(self) -> Tree:
        """How each leaf of the state is cut."""
        return self._of_state(self._own(self._cuts), _WHOLE)

    def state_parts(self) -> Tree:
        """The part whose parameters each leaf of the state belongs to; NO_PART of none."""
        return self._of_state(part_of_leaves(self._params), NO_PART)

    def _of_state(self, of_params: Tree, of_other: Any) -> Tree:
        return map_state(lambda _: of_params, lambda _: of_other, self.state_structs, self._params)

    def begin(self, initial: Tree) -> tuple[Tree, Tree, Tree]:
        """`held.initial_structs`' arrays -> (parameters that programs read, masters, fresh
        optimizer state)."""
        params, masters = self.take_masters(initial)

        def fresh(params: Tree) -> Tree:
            return self._tx.init(params if masters else self._pieces(params))

        shardings = jax.tree.map(lambda a: a.sharding, self.state_structs)
        held = masters or {p: params[p] for p in self._params}
        state = jax.jit(fresh, out_shardings=shardings)(held)
        if self._averages:
            _ = self._of_pieces  # compiled now, and not in the middle of a run
        return params, masters, state

    def take_masters(self, initial: Tree) -> tuple[Tree, Tree]:
        """(parameters that programs read, masters)."""
        if not self.master_structs:
            return initial, {}
        masters = self._own(initial)
        return {**initial, **self._made_of(masters)}, masters

    def averaged(self, state: Tree) -> Tree:
        """What programs hold of the own parts where the average stands for the parameters; {}
        without one."""
        return self._made_of(state[AVERAGE]) if self._averages else {}

    def _made_of(self, pieces: Tree) -> Tree:
        """Float32 shards of the own parts -> what programs hold."""
        if not is_local(self.segment.mesh):
            return jax.tree.map(absent, self._params)
        return self._of_pieces(pieces)

    @cached_property
    def _of_pieces(self) -> Callable[[Tree], Tree]:
        """The program of `_made_of`."""
        whole = self._gather()

        def made(pieces: Tree) -> Tree:
            return whole(jax.tree.map(lambda m, a: m.astype(a.dtype), pieces, self._params))

        shardings = jax.tree.map(lambda a: a.sharding, self._params)
        pieces = self._own(self.shard_structs)
        return jax.jit(made, out_shardings=shardings).lower(pieces).compile()

    def _gather(self) -> Callable[[Tree], Tree]:
        """Shards of the own parts -> what programs hold."""
        return shards.whole(self.segment.mesh, self._own(self._cuts), _specs(self._params))

    def _scalar(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), jnp.float32, sharding=self.segment.sharding())

    def reduced_structs(self) -> tuple[Tree, jax.ShapeDtypeStruct, Tree]:
        """Outputs of the reduction."""
        return self.shard_structs, self._scalar(), grad_structs(self.segment)

    def updated_structs(self) -> tuple[Tree, Tree, Tree, jax.ShapeDtypeStruct]:
        """Outputs of the update."""
        return self._params, self.master_structs, self.state_structs, self._scalar()

    def lower_reduce(self) -> jax.stages.Lowered:
        """(grads of ranks, gradient shards of the shared part's reader) -> (gradient shards, sum of
        squares of the own parts, zeroed grads); grads donated. The reader's shards are {} but for
        the owner of a tied parameter."""
        grads = grad_structs(self.segment)
        add_up = shards.sum_scatter(
            self.segment.mesh, _specs(grads), self._cuts, counted=tuple(self._params)
        )
        more = {"entry": self.shard_structs["entry"]} if self.adds_shared else {}

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
        pieces, scalar = self._own(self.shard_structs), self._scalar()
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
            updates, next_state = self._tx.update(grads, state, mine)
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


def _scaled(
    segment: Segment, rate_factors: Mapping[str, float], tx: optax.GradientTransformation
) -> optax.GradientTransformation:
    """The optimizer for trees by parts, whose steps are multiplied by the factor of their part's
    freeze group. `tx` may ask for the freeze group of each part, `groups`, and for the names of
    parameters that do not decay, `undecayed`."""
    groups = segment.module.freeze_groups
    more = {"groups": groups, "undecayed": float32_names_of(segment.module)}

    def update(grads: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        # optax relies on implicit promotion, which the user may have forbidden.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = optax.with_extra_args_support(tx).update(grads, state, params, **more)
        factors = {p: rate_factors.get(groups[p], 1.0) for p in updates}
        return {
            p: jax.tree.map(lambda u, f=factors[p]: u * f, tree) for p, tree in updates.items()
        }, state

    return optax.GradientTransformation(tx.init, update)


def _specs(structs: Tree) -> Tree:
    return jax.tree.map(lambda a: a.sharding.spec, structs)
