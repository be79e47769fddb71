"""An optimizer that looks at single elements, on whatever a segment's devices hold of them, and an
average of the parameters beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import float32_names_of
from dflop_jax.pipeline.cut import Cut
from dflop_jax.pipeline.segment import Segment

Tree = Any
NO_PART = ""  # of what belongs to no parameter, such as a count of steps
WHOLE = Cut(P(), P())


@dataclass(frozen=True)
class Averaged:
    """An optimizer that also keeps an average of the parameters after its steps, of which `decay`
    stays at every step."""

    stepping: optax.GradientTransformation
    decay: float

    def after(self, average: Tree, params: Tree) -> Tree:
        """The average after a step to these parameters; a parameter that no step changes is its
        average bit for bit, also where it is infinite, as bounds that bound nothing are."""

        def one(old: jax.Array, new: jax.Array) -> jax.Array:
            return jnp.where(old == new, new, new + self.decay * (old - new))

        return jax.tree.map(one, average, params)


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


class Elementwise:
    """State of `tx` for parameters that are held as `shards` (float32 structs by part) and cut as
    `cuts` say: sharded as they are."""

    def __init__(
        self, segment: Segment, tx: optax.GradientTransformation, cuts: Tree, shards: Tree
    ):
        self._segment, self._tx, self._cuts, self._shards = segment, tx, cuts, shards
        everywhere = segment.sharding()

        def sharded(leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        self.structs = map_state(
            lambda like: jax.tree.map(lambda a, s: sharded(a, s.sharding), like, shards),
            lambda leaf: sharded(leaf, everywhere),
            jax.eval_shape(self.fresh),
            shards,
        )

    def fresh(self) -> Tree:
        """The state before the first step, which begins with zeros whatever the parameters are."""
        return self._tx.init(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self._shards))

    def cuts(self) -> Tree:
        """How each leaf of the state is cut."""
        return map_state(lambda _: self._cuts, lambda _: WHOLE, self.structs, self._shards)

    def parts(self) -> Tree:
        """The part that each leaf of the state belongs to; NO_PART of none."""
        said = part_of_leaves(self._shards)
        return map_state(lambda _: said, lambda _: NO_PART, self.structs, self._shards)

    def update(self, grads: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """(steps, new state), of trees as they are held. `tx` may ask for the freeze group of each
        part, `groups`, and for the names of parameters that do not decay, `undecayed`."""
        module = self._segment.module
        more = {"groups": module.freeze_groups, "undecayed": float32_names_of(module)}
        # optax relies on implicit promotion, which the user may have forbidden.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return optax.with_extra_args_support(self._tx).update(grads, state, params, **more)
