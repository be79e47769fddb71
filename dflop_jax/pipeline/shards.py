"""What is split over data ranks (ZeRO, arXiv 1910.02054), and how pieces become whole.

A parameter is cut as `cut` says. Its optimizer state, its gradient and the parameter itself are cut
the same way, so that none of them moves to meet another.

`gather`, `scatter` and `scan_layers` are called under a `shard_map` that is manual over "data".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import Array
from dflop_jax.pipeline import fused
from dflop_jax.pipeline.cut import axes_of

Tree = Any


def gather(mesh: Mesh, cuts: Tree, arrays: Tree) -> Tree:
    """Pieces -> whole arrays, equal on every data rank, in their own dtype.

    Args:
      cuts: how each array is cut; arrays may lack the dim of layers.
    """
    return _on_tensor_ranks(fused.join, mesh, cuts, arrays, joins=True)


def scatter(mesh: Mesh, cuts: Tree, arrays: Tree) -> Tree:
    """Whole arrays of each data rank -> float32 pieces of their sum over the ranks; an array that
    is not cut stays this rank's own. `cuts` as for `gather`."""
    # float32: a bfloat16 reduction under partial-manual mode aborts on CPU.
    whole = jax.tree.map(lambda a: a.astype(jnp.float32), arrays)
    return _on_tensor_ranks(fused.scatter, mesh, cuts, whole, joins=False)


def _on_tensor_ranks(
    collective: Callable[..., None], mesh: Mesh, cuts: Tree, arrays: Tree, *, joins: bool
) -> Tree:
    """A collective over "data" on what each tensor-parallel device has of the arrays: left to the
    compiler, "model" is gathered first. `joins`: whether it makes whole arrays of pieces."""
    local, tree = jax.tree.flatten(arrays)
    moving = {i: cut for i, cut in enumerate(jax.tree.leaves(cuts)) if cut.is_split}
    ways = mesh.shape["data"]
    if mesh.shape["model"] == 1:
        collective(local, moving, ways)
        return jax.tree.unflatten(tree, local)

    def on_tensor_rank(moved: list[Array]) -> list[Array]:
        collective(moved, dict(enumerate(moving.values())), ways, together=False)
        return moved

    pieces = [_over_model(cut.spec, local[i].ndim) for i, cut in moving.items()]
    whole = [_over_model(cut.whole, local[i].ndim) for i, cut in moving.items()]
    ins, outs = (pieces, whole) if joins else (whole, pieces)
    moved = jax.shard_map(on_tensor_rank, in_specs=(ins,), out_specs=outs, axis_names={"model"})
    for i, array in zip(moving, moved([local[i] for i in moving]), strict=True):
        local[i] = array
    return jax.tree.unflatten(tree, local)


def _over_model(spec: P, n_dims: int) -> P:
    """How the last dims of an array are split over "model"."""
    axes = list(spec)[len(spec) - n_dims :]
    return P(*("model" if "model" in axes_of(axis) else None for axis in axes))


def scan_layers(
    whole_layer: Callable[[Array], Tree],
    visit: Callable[[Any, Tree, tuple[Array, Any]], tuple[Any, Any]],
    carry: Any,
    places: Array,
    xs: Any = None,
    *,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """`lax.scan` of `visit(carry, layer's whole parameters, (place, x)) -> (carry, y)` over layers
    at places one after the other, each gathered by `whole_layer(place)` while the one before it is
    visited; two layers are whole at a time.

    It is not differentiated: gradients would keep every gathered layer.
    """
    step, first, last = (-1, places[-1], places[0]) if reverse else (1, places[0], places[-1])

    def visit_next(state: tuple[Any, Tree], now: tuple[Array, Any]) -> tuple[Any, Any]:
        (carry, params), (i, _) = state, now
        # Before the visit, so that it is under way meanwhile. The last layer's is not used.
        ahead = whole_layer(jnp.where(i == last, i, i + step))
        carry, y = visit(carry, params, now)
        return (carry, ahead), y

    start = carry, whole_layer(first)
    (carry, _), ys = lax.scan(visit_next, start, (places, xs), reverse=reverse)
    return carry, ys
