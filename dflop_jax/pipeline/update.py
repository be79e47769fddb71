"""The end of a step: one reduction of the gradients over ranks, then the optimizer.

Optimizer state is sharded over the data axis (ZeRO-1): the reduction scatters, the update runs on
each rank's shard, and new parameters are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import Array
from dflop_jax.pipeline import fused
from dflop_jax.pipeline.pieces import STACKED
from dflop_jax.pipeline.segment import Segment

Tree = Any


def _spread(mesh: jax.sharding.Mesh, leaf: jax.ShapeDtypeStruct, spec: P) -> NamedSharding:
    """`spec` with "data" on the first free dim that it divides."""
    axes = list(spec) + [None] * (len(leaf.shape) - len(spec))
    for i, (size, axis) in enumerate(zip(leaf.shape, axes, strict=True)):
        if axis is None and size % mesh.shape["data"] == 0 and size > 0:
            axes[i] = "data"
            break
    return NamedSharding(mesh, P(*axes))


def _specs(structs: Tree) -> Tree:
    return jax.tree.map(lambda a: a.sharding.spec, structs)


def in_layers(params: Tree) -> Tree:
    """For each leaf of a tree by parts whether it belongs to the stacked layers."""
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
        structs, specs = segment.program_structs(), segment.param_specs()
        trained = {p: structs[p] for p in segment.parts if p in segment.trainable}
        self._params = {p: s for p, s in trained.items() if p in segment.own_parts}
        self._shard = {
            p: jax.tree.map(partial(_spread, segment.mesh), s, specs[p]) for p, s in trained.items()
        }
        self._trained = trained
        self.state_structs = self._state_structs()

    @property
    def shared(self) -> tuple[str, ...]:
        """Parts whose gradient another segment's update takes."""
        return tuple(p for p in self._trained if p not in self._params)

    def _state_structs(self) -> Tree:
        everywhere = self.segment.sharding()

        def sharded(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return optax.tree_utils.tree_map_params(
            self.tx,
            sharded,
            jax.eval_shape(self.tx.init, self._params),
            self._own(self._shard),
            transform_non_params=lambda leaf: sharded(leaf, everywhere),
        )

    def layered(self) -> Tree:
        """For each leaf of the state whether it belongs to the stacked layers."""
        return optax.tree_utils.tree_map_params(
            self.tx,
            lambda _, layered: layered,
            self.state_structs,
            in_layers(self._params),
            transform_non_params=lambda _: False,
        )

    def init_state(self, params: Tree) -> Tree:
        shardings = jax.tree.map(lambda a: a.sharding, self.state_structs)
        free = {p: params[p] for p in self._params}
        return jax.jit(self.tx.init, out_shardings=shardings)(free)

    def _scalar(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((), jnp.float32, sharding=self.segment.sharding())

    def _own(self, by_part: Tree) -> Tree:
        return {p: tree for p, tree in by_part.items() if p in self._params}

    def shard_structs(self) -> Tree:
        """Reduced gradients, each data rank its shard; shared parts included."""
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, jnp.float32, sharding=s),
            self._trained,
            self._shard,
        )

    def _shard_specs(self) -> Tree:
        return jax.tree.map(lambda s: s.spec, self._shard)

    def reduced_structs(self) -> tuple[Tree, jax.ShapeDtypeStruct, Tree]:
        """Outputs of the reduction."""
        return self.shard_structs(), self._scalar(), self.segment.grad_structs()

    def updated_structs(self) -> tuple[Tree, Tree, jax.ShapeDtypeStruct]:
        """Outputs of the update."""
        return self._params, self.state_structs, self._scalar()

    def lower_reduce(self) -> jax.stages.Lowered:
        """(grads of ranks, gradient shards of the shared part's reader) -> (gradient shards, sum of
        squares of the own parts, zeroed grads); grads donated. The reader's shards are {} but for
        the owner of a tied parameter."""
        grads, shards = self.segment.grad_structs(), self.shard_structs()
        add_up = fused.sum_scatter(
            self.segment.mesh, _specs(grads), self._shard_specs(), counted=tuple(self._params)
        )
        more = {"entry": shards["entry"]} if self.adds_shared else {}

        def reduce(grads: Tree, more: Tree) -> tuple[Tree, Array, Tree]:
            total, squares = add_up(grads, more)
            return total, squares, jax.tree.map(jnp.zeros_like, grads)

        outs = jax.tree.map(lambda a: a.sharding, self.reduced_structs())
        return jax.jit(reduce, out_shardings=outs, donate_argnums=0).lower(grads, more)

    def lower_update(self, n_norms: int) -> jax.stages.Lowered:
        """(params, state, gradient shards, sums of squares of all segments) ->
        (params, state, global norm before clipping); params and state donated. Each data rank makes
        new parameters of its shard only; these are gathered, in their own dtype."""
        shards, scalar = self._own(self.shard_structs()), self._scalar()
        sharding = self._own(self._shard)
        whole = fused.gather(
            self.segment.mesh, self._own(self._shard_specs()), _specs(self._params)
        )

        def update(
            params: Tree, state: Tree, grads: Tree, squares: tuple[Array, ...]
        ) -> tuple[Tree, Tree, Array]:
            norm = jnp.sqrt(jnp.stack(squares).sum())
            if self.clip_norm > 0:
                factor = jnp.minimum(1.0, self.clip_norm / jnp.maximum(norm, 1e-16))
                grads = jax.tree.map(lambda g: g * factor.reshape((1,) * g.ndim), grads)
            mine = jax.lax.with_sharding_constraint(params, sharding)
            # optax relies on implicit promotion, which the user may have forbidden.
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                updates, state = self.tx.update(grads, state, mine)
                updates = {
                    part: jax.tree.map(lambda u, f=self._factors[part]: u * f, tree)
                    for part, tree in updates.items()
                }
                new = optax.apply_updates(mine, updates)
            return whole(new), state, norm

        outs = jax.tree.map(lambda a: a.sharding, self.updated_structs())
        fn = jax.jit(update, out_shardings=outs, donate_argnums=(0, 1))
        return fn.lower(self._params, self.state_structs, shards, (scalar,) * n_norms)
