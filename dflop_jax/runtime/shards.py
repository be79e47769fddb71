"""Collectives of ZeRO (arXiv 1910.02054): gather parameters and reduce gradients over data ranks.

`ZeroSpec` says how a parameter is stored. Its optimizer state and its gradient are stored in the
same way, so that an update moves none of them.

A collective has a fixed cost (milliseconds between CPU processes), and a model has dozens of
parameters. So arrays are concatenated, up to `MAX_FUSED_ELEMENTS` at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dflop_jax.contract import Array
from dflop_jax.runtime.zero_sharding import ZeroSpec, axes_of, data_axis_dim

Tree = Any
# Elements of one fused collective; a larger limit copies more bytes at a time.
MAX_FUSED_ELEMENTS = 1 << 25


def make_gradient_reduction(
    mesh: Mesh, grad_specs: Tree, zero_specs: Tree, counted: Collection[str]
) -> Callable[[Tree, Tree], Tree]:
    """Return a function (ranks' gradients [rank, ...] by part, sums to add to some parts) -> (total
    stored by `zero_specs`, sum of squares of all elements of the `counted` parts).

    `grad_specs[...][0]` names the mesh axes of the ranks' dim. If "data" is not among them, the
    gradient is already stored by `zero_specs`; the sums to add always are.
    """
    by_leaf, tree = jax.tree.flatten(zero_specs)
    shard_specs = jax.tree.map(lambda zero_spec: zero_spec.spec, zero_specs)
    ranks = [set(axes_of(s[0])) for s in jax.tree.leaves(grad_specs)]
    dp = mesh.shape["data"]

    def body(grads: Tree, shared_grads: Tree) -> tuple[Tree, Array]:
        local = [g.sum(axis=0) for g in jax.tree.leaves(grads)]
        if mesh.shape["stage"] > 1:
            _all_reduce_into(local, [i for i, axes in enumerate(ranks) if "stage" in axes], "stage")
        if dp > 1:
            unreduced = [i for i, axes in enumerate(ranks) if "data" in axes]
            _all_reduce_into(local, [i for i in unreduced if not by_leaf[i].is_split], "data")
            split = {i: by_leaf[i] for i in unreduced if by_leaf[i].is_split}
            _reduce_scatter_into(local, split, dp)
            replicated = [i for i, z in enumerate(by_leaf) if z.n_replicas > 1]
            if replicated:  # add up the replicas' sums
                same_shard = np.transpose(_rank_groups(by_leaf[replicated[0]], dp) or []).tolist()
                _all_reduce_into(local, replicated, "data", same_shard)
        total = jax.tree.unflatten(tree, local)
        total |= {p: jax.tree.map(jnp.add, total[p], m) for p, m in shared_grads.items()}
        squares = jnp.float32(0)
        of_counted = ({p: tree[p] for p in counted} for tree in (total, zero_specs))
        for x, zero_spec in zip(*map(jax.tree.leaves, of_counted), strict=True):
            # An element counts once, also if several devices hold it.
            n_shards = prod(mesh.shape[a] for d in zero_spec.spec for a in axes_of(d))
            squares += jnp.sum(jnp.square(x)) / (mesh.size * zero_spec.n_replicas // n_shards)
        return total, lax.psum(squares, mesh.axis_names)

    def add_up(grads: Tree, shared_grads: Tree) -> Tree:
        ins = (grad_specs, {p: shard_specs[p] for p in shared_grads})
        outs = (shard_specs, P())
        run = jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
        return run(grads, shared_grads)

    return add_up


def make_param_gather(mesh: Mesh, zero_specs: Tree, specs: Tree) -> Callable[[Tree], Tree]:
    """Return a function that maps arrays stored by `zero_specs` to arrays sharded by `specs`."""
    leaves = enumerate(zip(jax.tree.leaves(zero_specs), jax.tree.leaves(specs), strict=True))
    gathered = {i: z for i, (z, new) in leaves if z.is_split and data_axis_dim(new) < 0}
    shard_specs = jax.tree.map(lambda zero_spec: zero_spec.spec, zero_specs)
    dp = mesh.shape["data"]

    def body(arrays: Tree) -> Tree:
        local, tree = jax.tree.flatten(arrays)
        if dp > 1:
            _all_gather_into(local, gathered, dp)
        return jax.tree.unflatten(tree, local)

    return jax.shard_map(body, mesh=mesh, in_specs=(shard_specs,), out_specs=specs, check_vma=False)


# `all_gather` and `reduce_scatter` are called under a `shard_map` that is manual over "data".


def all_gather(mesh: Mesh, zero_specs: Tree, arrays: Tree) -> Tree:
    """Gather shards stored by `zero_specs` into whole arrays, equal on all data ranks; dtypes stay.
    Arrays may lack the specs' dim of layers."""
    return _on_tensor_ranks(_all_gather_into, mesh, zero_specs, arrays, gathers=True)


def reduce_scatter(mesh: Mesh, zero_specs: Tree, arrays: Tree) -> Tree:
    """Reduce each data rank's arrays to float32 shards of their sum; an array that ranks do not
    share is returned unreduced. `zero_specs`: as in `all_gather`."""
    # float32: a bfloat16 reduction under partial-manual mode aborts on CPU.
    whole = jax.tree.map(lambda a: a.astype(jnp.float32), arrays)
    return _on_tensor_ranks(_reduce_scatter_into, mesh, zero_specs, whole, gathers=False)


def _on_tensor_ranks(
    collective: Callable[..., None], mesh: Mesh, zero_specs: Tree, arrays: Tree, *, gathers: bool
) -> Tree:
    """Run a collective over "data" on each tensor rank's part of the arrays; by itself, the
    compiler would gather "model" first. `gathers`: whether it turns shards into whole arrays."""
    local, tree = jax.tree.flatten(arrays)
    split = {i: z for i, z in enumerate(jax.tree.leaves(zero_specs)) if z.is_split}
    dp = mesh.shape["data"]
    if mesh.shape["model"] == 1:
        collective(local, split, dp)
        return jax.tree.unflatten(tree, local)

    def on_tensor_rank(moved: list[Array]) -> list[Array]:
        collective(moved, dict(enumerate(split.values())), dp, fuse=False)
        return moved

    shard_specs = [_model_spec(z.spec, local[i].ndim) for i, z in split.items()]
    full_specs = [_model_spec(z.base_spec, local[i].ndim) for i, z in split.items()]
    ins, outs = (shard_specs, full_specs) if gathers else (full_specs, shard_specs)
    run = jax.shard_map(on_tensor_rank, in_specs=(ins,), out_specs=outs, axis_names={"model"})
    for i, array in zip(split, run([local[i] for i in split]), strict=True):
        local[i] = array
    return jax.tree.unflatten(tree, local)


def _model_spec(spec: P, n_dims: int) -> P:
    """Return how the last dims of an array are split over "model"."""
    axes = list(spec)[len(spec) - n_dims :]
    return P(*("model" if "model" in axes_of(axis) else None for axis in axes))


# The functions below run on one rank of `dp`, under a `shard_map` that is manual over "data".
# `zero_specs` maps the index of an array to its spec.


def _all_gather_into(
    arrays: list[Array], zero_specs: Mapping[int, ZeroSpec], dp: int, *, fuse: bool = True
) -> None:
    """Replace shards by whole arrays; without `fuse`, each array has its own collective."""
    dims = _sharded_dims(zero_specs, arrays)
    for group in _fusion_groups(dims, arrays, MAX_FUSED_ELEMENTS if fuse else 0):
        flat = jnp.concatenate([arrays[i].ravel() for i in group])
        rank_groups = _rank_groups(zero_specs[group[0]], dp)
        gathered = lax.all_gather(flat, "data", axis_index_groups=rank_groups)
        for i, shard in zip(group, _split_flat(gathered, [arrays[i].shape for i in group])):
            arrays[i] = _from_chunks(shard, dims[i])
    for i, zero_spec in zero_specs.items():
        if zero_spec.local_shape:
            arrays[i] = zero_spec.unflatten_local(arrays[i])


def _reduce_scatter_into(
    arrays: list[Array], zero_specs: Mapping[int, ZeroSpec], dp: int, *, fuse: bool = True
) -> None:
    """Replace whole arrays by this rank's shard of their sum over a replica; `fuse` as above."""
    for i, zero_spec in zero_specs.items():
        if zero_spec.local_shape:
            arrays[i] = zero_spec.flatten_local(arrays[i])
    dims = _sharded_dims(zero_specs, arrays)
    for group in _fusion_groups(dims, arrays, MAX_FUSED_ELEMENTS if fuse else 0):
        ranks = dp // zero_specs[group[0]].n_replicas
        chunks = [_to_chunks(arrays[i], dims[i], ranks) for i in group]
        flat = jnp.concatenate([c.reshape(ranks, -1) for c in chunks], axis=1)
        rank_groups = _rank_groups(zero_specs[group[0]], dp)
        reduced = lax.psum_scatter(flat, "data", axis_index_groups=rank_groups)
        for i, shard in zip(group, _split_flat(reduced, [c.shape[1:] for c in chunks])):
            arrays[i] = shard


def _rank_groups(zero_spec: ZeroSpec, dp: int) -> list[list[int]] | None:
    """Return groups of neighbouring data ranks that share a replica; None: all ranks share one."""
    if zero_spec.n_replicas == 1:
        return None
    return np.arange(dp).reshape(zero_spec.n_replicas, -1).tolist()


def _sharded_dims(zero_specs: Mapping[int, ZeroSpec], arrays: Sequence[Array]) -> dict[int, int]:
    """Return the dim of each array that data ranks split; arrays may lack the layers' dim."""
    specs = {i: zero_spec.spec for i, zero_spec in zero_specs.items()}
    return {i: data_axis_dim(spec) - (len(spec) - arrays[i].ndim) for i, spec in specs.items()}


def _fusion_groups(
    indices: Iterable[int], arrays: Sequence[Array], max_elements: int
) -> Iterator[list[int]]:
    """Yield indices of arrays of one dtype to fuse, with at most `max_elements` elements in all."""
    group: list[int] = []
    size = 0
    for i in sorted(indices, key=lambda i: str(arrays[i].dtype)):
        new_dtype = group and arrays[i].dtype != arrays[group[0]].dtype
        if group and (new_dtype or size + arrays[i].size > max_elements):
            yield group
            group, size = [], 0
        group.append(i)
        size += arrays[i].size
    if group:
        yield group


def _all_reduce_into(
    arrays: list[Array], indices: Sequence[int], axis: str, groups: list[list[int]] | None = None
) -> None:
    """Sum the arrays at `indices` over a mesh axis, or over groups of its ranks."""
    for group in _fusion_groups(indices, arrays, MAX_FUSED_ELEMENTS):
        flat = jnp.concatenate([arrays[i].ravel() for i in group])
        flat = lax.psum(flat, axis, axis_index_groups=groups)
        for i, reduced in zip(group, _split_flat(flat, [arrays[i].shape for i in group])):
            arrays[i] = reduced


def _split_flat(flat: Array, shapes: Sequence[tuple[int, ...]]) -> Iterator[Array]:
    """Yield consecutive parts of the last dim, reshaped to these shapes after the other dims."""
    stops = np.cumsum([prod(shape) for shape in shapes])
    for part, shape in zip(jnp.split(flat, stops[:-1], axis=-1), shapes, strict=True):
        yield part.reshape(*flat.shape[:-1], *shape)


def _to_chunks(array: Array, dim: int, dp: int) -> Array:
    """Cut an array along a dim into [dp, ...]."""
    shape = (*array.shape[:dim], dp, array.shape[dim] // dp, *array.shape[dim + 1 :])
    return jnp.moveaxis(array.reshape(shape), dim, 0)


def _from_chunks(chunks: Array, dim: int) -> Array:
    """Invert `_to_chunks`."""
    array = jnp.moveaxis(chunks, 0, dim)
    return array.reshape(*array.shape[:dim], -1, *array.shape[dim + 2 :])
