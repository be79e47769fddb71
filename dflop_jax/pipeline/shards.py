"""What is split over data ranks (ZeRO, arXiv 1910.02054), and how pieces become whole.

A parameter is cut as `cut` says. Its optimizer state, its gradient and the parameter itself are cut
the same way, so that none of them moves to meet another.

`gather`, `scatter` and `scan_layers` are called under a `shard_map` that is manual over "data".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    whole_layers: Sequence[Callable[[Array], Tree]],
    visits: Sequence[Callable[[Any, Tree, tuple[Array, Any]], tuple[Any, Any]]],
    carry: Any,
    rows: Sequence[Array],
    steps: Sequence[int],
    xs: Any = None,
    *,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """`lax.scan` over periods of layers: `visits[j](carry, whole parameters, (row, x)) -> (carry,
    y)` of the j-th layer of each, gathered by `whole_layers[j](row)` while the one before it is
    visited; two layers are whole at a time. It gives (carry, (y of each layer of the period)).

    It is not differentiated: gradients would keep every gathered layer.

    Args:
      rows: of each layer of the period the rows [repeats] that it has.
      steps: how far these are apart.
      xs: of each layer of the period what its visits get, with a leading dim of repeats; or None.
    """
    order = range(len(visits))[:: -1 if reverse else 1]
    head = order[0]  # the layer that a period begins with
    first, last = (rows[head][i] for i in ((-1, 0) if reverse else (0, -1)))
    step = (-1 if reverse else 1) * steps[head]

    def visit_next(state: tuple[Any, Tree], now: tuple[Sequence[Array], Any]) -> tuple[Any, Any]:
        (carry, params), (here, every) = state, now
        ys = {}
        for j, following in zip(order, (*order[1:], head), strict=True):
            row = here[following]
            if j == order[-1]:  # of the next period; that of the last one is not used
                row = jnp.where(row == last, row, row + step)
            # Before the visit, so that it is under way meanwhile.
            ahead = whole_layers[following](row)
            carry, ys[j] = visits[j](carry, params, (here[j], None if every is None else every[j]))
            params = ahead
        return (carry, params), tuple(ys[j] for j in sorted(order))

    start = carry, whole_layers[head](first)
    (carry, _), ys = lax.scan(visit_next, start, (tuple(rows), xs), reverse=reverse)
    return carry, ys
