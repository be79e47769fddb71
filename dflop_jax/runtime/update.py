"""The end of a step: one reduction of the gradients over ranks, then the optimizer.

Optimizer state is split over data ranks: the reduction scatters gradients, and the update runs on
each rank's shard. New parameters are gathered; with ZeRO 3 they stay shards. If programs use
another dtype than float32, the optimizer keeps float32 masters and casts the parameters from them.

The optimizer is elementwise, so it can run on any shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import Array, float32_names_of
from dflop_jax.runtime import parameter_layout as layout
from dflop_jax.runtime import shards
from dflop_jax.runtime.communicator import is_local, remote_array
from dflop_jax.runtime.segment import Segment
from dflop_jax.runtime.zero_sharding import ZeroSpec

Tree = Any
EMA_KEY = "ema"  # the key of the parameters' moving average in a state
NO_PARAMETER_PART = ""  # part of state leaves that belong to no parameter, such as a step count


@dataclass(frozen=True)
class EmaOptimizer:
    """An optimizer with a moving average of the parameters; a step keeps `decay` of it."""

    inner: optax.GradientTransformation
    decay: float

    def init(self, params: Tree) -> Tree:
        return {"tx": self.inner.init(params), EMA_KEY: params}

    def update(self, grads: Tree, state: Tree, params: Tree, **more: Any) -> tuple[Tree, Tree]:
        """Update; a constant parameter's average equals it to the bit, also if infinite."""
        updates, stepped = self.inner.update(grads, state["tx"], params, **more)
        average = jax.tree.map(
            lambda old, new: jnp.where(old == new, new, new + self.decay * (old - new)),
            state[EMA_KEY],
            optax.apply_updates(params, updates),
        )
        return updates, {"tx": stepped, EMA_KEY: average}


# Must be elementwise, since devices hold shards of parameters.
Optimizer: TypeAlias = "optax.GradientTransformation | EmaOptimizer"


def map_optimizer_state(
    map_params: Callable[[Tree], Tree], map_leaf: Callable[[Any], Any], state: Tree, params: Tree
) -> Tree:
    """Apply `map_params` to subtrees shaped like `params`, and `map_leaf` to all other leaves."""
    shape: Any = jax.tree.structure(params)

    def matches_params(node: Any) -> bool:
        return bool(jax.tree.structure(node) == shape)

    return jax.tree.map(
        lambda node: map_params(node) if matches_params(node) else map_leaf(node),
        state,
        is_leaf=matches_params,
    )


def part_of_leaves(params: Tree) -> Tree:
    """Return the part of each leaf of a tree by parts."""
    return {p: jax.tree.map(lambda _, p=p: p, tree) for p, tree in params.items()}


class SegmentUpdate:
    """Reduce and update programs of one segment's trainable parameters.

    `rate_factors` multiply the steps of freeze groups; other groups use the optimizer's rate. If
    another segment reads a tied parameter, that segment reduces its gradient without counting it in
    the norm, and the owner (`adds_shared`) adds it to its own gradient.

    Attributes:
      shard_structs: reduced gradients, sharded over data ranks; shared parts included.
      shared: parts whose gradient another segment's update uses.
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
        trained = [p for p in segment.read_parts if p in segment.trainable]
        self.shared = tuple(p for p in trained if p not in segment.owned_parts)
        zero_specs = layout.state_zero_specs(segment)
        self._zero_specs = {p: zero_specs[p] for p in trained}
        self.shard_structs = layout.stored_structs(segment, self._zero_specs, float32=trained)
        self._params = self._owned_trained(layout.program_structs(segment))
        masters = layout.initial_structs(segment) if layout.master_parts(segment) else {}
        self.master_structs = self._owned_trained(masters)
        self._has_ema = isinstance(tx, EmaOptimizer)
        inner = tx.inner if isinstance(tx, EmaOptimizer) else tx
        scaled = _scale_by_freeze_group(segment, rate_factors, inner)
        self._tx = replace(tx, inner=scaled) if isinstance(tx, EmaOptimizer) else scaled
        owned_shards = self._owned_trained(self.shard_structs)

        def placed(a: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

        self.state_structs = map_optimizer_state(
            lambda tree: jax.tree.map(placed, tree, _shardings(owned_shards)),
            lambda a: placed(a, segment.sharding()),
            jax.eval_shape(self._tx.init, owned_shards),
            owned_shards,
        )

    def _owned_trained(self, tree: Tree) -> Tree:
        s = self.segment
        return {p: t for p, t in tree.items() if p in s.trainable and p in s.owned_parts}

    def state_zero_specs(self) -> Tree:
        """Return the `ZeroSpec` of each leaf of the state."""
        return self._map_state(self._owned_trained(self._zero_specs), ZeroSpec(P(), P()))

    def state_parts(self) -> Tree:
        """Return the part whose parameters each leaf belongs to, or `NO_PARAMETER_PART`."""
        return self._map_state(part_of_leaves(self._params), NO_PARAMETER_PART)

    def _map_state(self, params_value: Tree, leaf_value: Any) -> Tree:
        return map_optimizer_state(
            lambda _: params_value, lambda _: leaf_value, self.state_structs, self._params
        )

    def init_state(self, initial: Tree) -> tuple[Tree, Tree, Tree]:
        """Map arrays of `initial_structs` to (program parameters, masters, optimizer state)."""
        params, masters = self.split_masters(initial)

        def init_optimizer(params: Tree) -> Tree:
            return self._tx.init(params if masters else self._local_shards(params))

        stepped_params = masters or {p: params[p] for p in self._params}
        init = jax.jit(init_optimizer, out_shardings=_shardings(self.state_structs))
        state = init(stepped_params)
        if self._has_ema:
            _ = self._gather_program  # compiled now, not during the run
        return params, masters, state

    def split_masters(self, initial: Tree) -> tuple[Tree, Tree]:
        """Return (parameters that programs read, masters)."""
        if not self.master_structs:
            return initial, {}
        masters = self._owned_trained(initial)
        return {**initial, **self._gather_params(masters)}, masters

    def averaged(self, state: Tree) -> Tree:
        """Return the owned parts' moving average as programs read it; {} if there is none."""
        return self._gather_params(state[EMA_KEY]) if self._has_ema else {}

    def _gather_params(self, param_shards: Tree) -> Tree:
        """Gather float32 shards of the owned parts into the parameters that programs read."""
        if not is_local(self.segment.mesh):
            return jax.tree.map(remote_array, self._params)
        return self._gather_program(param_shards)

    @cached_property
    def _gather_program(self) -> Callable[[Tree], Tree]:
        gather = jax.jit(self._make_gather(), out_shardings=_shardings(self._params))
        return gather.lower(self._owned_trained(self.shard_structs)).compile()

    def _make_gather(self) -> Callable[[Tree], Tree]:
        """Return a function: shards of the owned parts -> the parameters that programs read."""
        gather = shards.make_param_gather(
            self.segment.mesh, self._owned_trained(self._zero_specs), _partition_specs(self._params)
        )
        return lambda new: gather(jax.tree.map(lambda n, a: n.astype(a.dtype), new, self._params))

    def _scalar(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), jnp.float32, sharding=self.segment.sharding())

    def reduced_structs(self) -> tuple[Tree, jax.ShapeDtypeStruct, Tree]:
        """Return structs of the outputs of `lower_reduce`."""
        return self.shard_structs, self._scalar(), layout.grad_structs(self.segment)

    def updated_structs(self) -> tuple[Tree, Tree, Tree, jax.ShapeDtypeStruct]:
        """Return structs of the outputs of `lower_update`."""
        return self._params, self.master_structs, self.state_structs, self._scalar()

    def lower_reduce(self) -> jax.stages.Lowered:
        """Lower the program (grads of ranks, gradient shards of the tied entry's reader) ->
        (gradient shards, sum of squares of the owned parts, zeroed grads). It donates grads. The
        reader's shards are {} unless the segment owns a tied parameter."""
        add_up = shards.make_gradient_reduction(
            self.segment.mesh,
            _partition_specs(layout.stacked_grad_structs(self.segment)),
            self._zero_specs,
            counted=tuple(self._params),
        )
        shared_grads = {"entry": self.shard_structs["entry"]} if self.adds_shared else {}

        def reduce(grads: Tree, shared_grads: Tree) -> tuple[Tree, Array, Tree]:
            total, squares = add_up(layout.stack_gradients(self.segment, grads), shared_grads)
            return total, squares, jax.tree.map(jnp.zeros_like, grads)

        outs = _shardings(self.reduced_structs())
        program = jax.jit(reduce, out_shardings=outs, donate_argnums=0)
        return program.lower(layout.grad_structs(self.segment), shared_grads)

    def _local_shards(self, params: Tree) -> Tree:
        if self.segment.plan.zero == 3:
            return params
        zero_specs = self._owned_trained(self._zero_specs)
        shardings = jax.tree.map(lambda z: self.segment.sharding(*z.spec), zero_specs)
        stored = jax.tree.map(lambda z, a: z.to_stored(a), zero_specs, params)
        return jax.lax.with_sharding_constraint(stored, shardings)

    def lower_update(self, n_segments: int) -> jax.stages.Lowered:
        """Lower the program (params, masters, state, gradient shards, sums of squares of all
        segments, upper bound of their total) -> (params, masters, state, total). It donates params,
        masters and state. If the total is above the bound or NaN, it returns them unchanged: every
        device of every segment adds the same numbers in the same order, so all decide alike. Each
        data rank updates its shard; new parameters are gathered in the dtype that programs read."""
        grad_shards, scalar = self._owned_trained(self.shard_structs), self._scalar()
        gather = self._make_gather()

        def update(
            params: Tree,
            masters: Tree,
            state: Tree,
            grads: Tree,
            squares: tuple[Array, ...],
            limit: Array,
        ) -> tuple[Tree, Tree, Tree, Array]:
            total = functools.reduce(jnp.add, squares)  # fixed order: all devices get equal bits
            applies = total <= limit  # false for NaN
            if self.clip_norm > 0:
                norm = jnp.sqrt(total)
                factor = jnp.minimum(1.0, self.clip_norm / jnp.maximum(norm, 1e-16))
                grads = jax.tree.map(lambda g: g * factor.reshape((1,) * g.ndim), grads)
            stepped = masters or self._local_shards(params)
            updates, next_state = self._tx.update(grads, state, stepped)
            new = optax.apply_updates(stepped, updates)
            new, state = jax.tree.map(
                lambda n, old: jnp.where(applies, n, old), (new, next_state), (stepped, state)
            )
            return gather(new), new if masters else {}, state, total

        outs = _shardings(self.updated_structs())
        # Parameters are donated even if the optimizer reads masters instead.
        fn = jax.jit(update, out_shardings=outs, donate_argnums=(0, 1, 2), keep_unused=True)
        args = self._params, self.master_structs, self.state_structs, grad_shards
        return fn.lower(*args, (scalar,) * n_segments, scalar)


def _scale_by_freeze_group(
    segment: Segment, rate_factors: Mapping[str, float], tx: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Return the optimizer for trees by part, with steps multiplied by the factor of the part's
    freeze group. `tx` may take two extra arguments: `groups`, the freeze group of each part, and
    `undecayed`, names of parameters without weight decay."""
    groups = segment.module.freeze_groups
    more = {"groups": groups, "undecayed": float32_names_of(segment.module)}

    def update(grads: Tree, state: Tree, params: Tree = None) -> tuple[Tree, Tree]:
        # optax relies on implicit promotion, which the user may have forbidden.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = optax.with_extra_args_support(tx).update(grads, state, params, **more)
        for part, tree in updates.items():
            factor = rate_factors.get(groups[part], 1.0)
            updates = {**updates, part: jax.tree.map(lambda u, f=factor: u * f, tree)}
        return updates, state

    return optax.GradientTransformation(tx.init, update)


def _shardings(structs: Tree) -> Tree:
    return jax.tree.map(lambda a: a.sharding, structs)


def _partition_specs(structs: Tree) -> Tree:
    return jax.tree.map(lambda a: a.sharding.spec, structs)
