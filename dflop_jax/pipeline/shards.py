"""What is split over data ranks (ZeRO, arXiv 1910.02054): one rule, and how pieces become whole.

Of every parameter one dim is split over the mesh axis "data", the first that is free and that the
ranks divide; a parameter without such a dim stays whole. Its optimizer state, its gradient and the
parameter itself are cut the same way, so that none of them moves to meet another.

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

Tree = Any


def split_spec(leaf: jax.ShapeDtypeStruct, spec: P, ways: int) -> P:
    """`spec` with "data" on the first free dim that `ways` divides; as it is if there is none."""
    axes = list(spec) + [None] * (len(leaf.shape) - len(spec))
    for i, (size, axis) in enumerate(zip(leaf.shape, axes, strict=True)):
        if axis is None and ways > 1 and size > 0 and size % ways == 0:
            return P(*axes[:i], "data", *axes[i + 1 :])
    return spec


def gather(mesh: Mesh, specs: Tree, arrays: Tree) -> Tree:
    """Pieces -> whole arrays, equal on every data rank, in their own dtype.

    Args:
      specs: how each array is split; the leading dims that an array lacks (the layers' dim of one
        layer) are left out.
    """
    return _on_tensor_ranks(fused.join, mesh, specs, arrays)


def scatter(mesh: Mesh, specs: Tree, arrays: Tree) -> Tree:
    """Whole arrays of each data rank -> float32 pieces of their sum over the ranks; an array that
    is not split stays this rank's own. `specs` as for `gather`."""
    # float32: a bfloat16 reduction under partial-manual mode aborts on CPU.
    whole = jax.tree.map(lambda a: a.astype(jnp.float32), arrays)
    return _on_tensor_ranks(fused.scatter, mesh, specs, whole)


def _on_tensor_ranks(
    collective: Callable[..., None], mesh: Mesh, specs: Tree, arrays: Tree
) -> Tree:
    """A collective over "data" on what each tensor-parallel device has of the arrays: left to the
    compiler, "model" is gathered first."""
    local, tree = jax.tree.flatten(arrays)
    dims, ways = _dims(specs, local), mesh.shape["data"]
    if mesh.shape["model"] == 1:
        collective(local, dims, ways)
        return jax.tree.unflatten(tree, local)

    def on_tensor_rank(moved: list[Array]) -> list[Array]:
        collective(moved, dict(enumerate(dims.values())), ways, together=False)
        return moved

    named = jax.tree.leaves(specs)
    parts = [_over_model(named[i], local[i].ndim) for i in dims]
    moved = jax.shard_map(on_tensor_rank, in_specs=(parts,), out_specs=parts, axis_names={"model"})
    for i, array in zip(dims, moved([local[i] for i in dims]), strict=True):
        local[i] = array
    return jax.tree.unflatten(tree, local)


def _over_model(spec: P, n_dims: int) -> P:
    """How the last dims of an array are split over "model"."""
    axes = list(spec)[len(spec) - n_dims :]
    return P(*("model" if "model" in fused.axes_of(axis) else None for axis in axes))


def _dims(specs: Tree, arrays: list[Array]) -> dict[int, int]:
    """The dim of each array that is split, by the place of the array."""
    placed = enumerate(zip(jax.tree.leaves(specs), arrays, strict=True))
    return {i: d - (len(s) - a.ndim) for i, (s, a) in placed if (d := fused.data_dim(s)) >= 0}


def scan_layers(
    gather_layer: Callable[[Tree], Tree],
    visit: Callable[[Any, Tree, Any], tuple[Any, Any]],
    carry: Any,
    layers: Tree,
    xs: Any = None,
    *,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """`lax.scan` of `visit(carry, layer's whole parameters, x) -> (carry, y)` over stacked pieces
    of layers, each gathered while the one before it is visited; two layers are whole at a time.

    It is not differentiated: gradients would keep every gathered layer.
    """
    n_layers = jax.tree.leaves(layers)[0].shape[0]
    step, first, last = (-1, n_layers - 1, 0) if reverse else (1, 0, n_layers - 1)

    def whole(i: Array) -> Tree:
        layer = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, 0, keepdims=False), layers)
        return gather_layer(layer)

    def visit_next(state: tuple[Any, Tree], now: tuple[Array, Any]) -> tuple[Any, Any]:
        (carry, params), (i, x) = state, now
        # Before the visit, so that it is under way meanwhile. The last layer's is not used.
        ahead = whole(jnp.where(i == last, i, i + step))
        carry, y = visit(carry, params, x)
        return (carry, ahead), y

    start = carry, whole(jnp.int32(first))
    (carry, _), ys = lax.scan(visit_next, start, (jnp.arange(n_layers), xs), reverse=reverse)
    return carry, ys
