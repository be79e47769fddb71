"""What is split over data ranks (ZeRO, arXiv 1910.02054), and how pieces become whole.

A parameter is cut as `cut` says. Its optimizer state, its gradient and the parameter itself are cut
the same way, so that none of them moves to meet another.

A collective has a fixed price (milliseconds between CPU processes), and a model has dozens of
parameters. So arrays are laid end to end, up to `MOST_ELEMENTS` at a time.
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
from dflop_jax.runtime.zero_sharding import Cut, axes_of, data_dim

Tree = Any
# Elements that are laid end to end for one collective; twice as many copy twice as much at a time,
# for fewer collectives.
MOST_ELEMENTS = 1 << 25


def sum_scatter(
    mesh: Mesh, grad_specs: Tree, cuts: Tree, counted: Collection[str]
) -> Callable[[Tree, Tree], Tree]:
    """(ranks' gradients [rank, ...] by part, sums of some parts to be added) -> (their sum, sharded
    over "data" as `cuts` say; the sum of squares of all elements of the `counted` parts).

    `grad_specs[...][0]` names the mesh axes that the ranks' dim is sharded over; without "data"
    there the gradient is sharded as the sum already, and so is what is to be added.
    """
    by_leaf, tree = jax.tree.flatten(cuts)
    shard_specs = jax.tree.map(lambda cut: cut.spec, cuts)
    ranks = [set(axes_of(s[0])) for s in jax.tree.leaves(grad_specs)]
    ways = mesh.shape["data"]

    def body(grads: Tree, more: Tree) -> tuple[Tree, Array]:
        local = [g.sum(axis=0) for g in jax.tree.leaves(grads)]
        over_stage = [i for i, axes in enumerate(ranks) if "stage" in axes]
        if mesh.shape["stage"] > 1:
            _replace(local, over_stage, lambda flat: lax.psum(flat, "stage"))
        if ways > 1:
            apart = [i for i, axes in enumerate(ranks) if "data" in axes]
            alike = [i for i in apart if not by_leaf[i].is_split]
            _replace(local, alike, lambda flat: lax.psum(flat, "data"))
            _scatter(local, {i: by_leaf[i] for i in apart if i not in alike}, ways)
            _sum_copies(local, by_leaf, ways)
        total = jax.tree.unflatten(tree, local)
        added = {p: jax.tree.map(jnp.add, total[p], m) for p, m in more.items()}
        total = {**total, **added}
        squares = jnp.float32(0)
        of_counted = ({p: tree[p] for p in counted} for tree in (total, cuts))
        for x, cut in zip(*map(jax.tree.leaves, of_counted), strict=True):
            # An element counts once, on however many devices it is.
            ways_apart = prod(mesh.shape[a] for d in cut.spec for a in axes_of(d))
            squares += jnp.sum(jnp.square(x)) / (mesh.size * cut.copies // ways_apart)
        return total, lax.psum(squares, mesh.axis_names)

    def add_up(grads: Tree, more: Tree) -> Tree:
        ins = (grad_specs, {p: shard_specs[p] for p in more})
        outs = (shard_specs, P())
        return jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)(
            grads, more
        )

    return add_up


def whole(mesh: Mesh, cuts: Tree, specs: Tree) -> Callable[[Tree], Tree]:
    """Arrays that are cut as `cuts` say -> the same sharded by `specs`: whole on every data rank,
    or cut as before."""
    placed = enumerate(zip(jax.tree.leaves(cuts), jax.tree.leaves(specs), strict=True))
    joined = {i: cut for i, (cut, new) in placed if cut.is_split and data_dim(new) < 0}
    shard_specs = jax.tree.map(lambda cut: cut.spec, cuts)
    ways = mesh.shape["data"]

    def body(arrays: Tree) -> Tree:
        local, tree = jax.tree.flatten(arrays)
        if ways > 1:
            _join(local, joined, ways)
        return jax.tree.unflatten(tree, local)

    return jax.shard_map(body, mesh=mesh, in_specs=(shard_specs,), out_specs=specs, check_vma=False)


# `gather` and `scatter` are called under a `shard_map` that is manual over "data".


def gather(mesh: Mesh, cuts: Tree, arrays: Tree) -> Tree:
    """Pieces -> whole arrays, equal on every data rank, in their own dtype.

    Args:
      cuts: how each array is cut; arrays may lack the dim of layers.
    """
    return _on_tensor_ranks(_join, mesh, cuts, arrays, joins=True)


def scatter(mesh: Mesh, cuts: Tree, arrays: Tree) -> Tree:
    """Whole arrays of each data rank -> float32 pieces of their sum over the ranks; an array that
    is not cut stays this rank's own. `cuts` as for `gather`."""
    # float32: a bfloat16 reduction under partial-manual mode aborts on CPU.
    whole = jax.tree.map(lambda a: a.astype(jnp.float32), arrays)
    return _on_tensor_ranks(_scatter, mesh, cuts, whole, joins=False)


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


# Of one rank, under a `shard_map` that is manual over "data": `cuts` says by the place of an array
# how it is cut over `ways` ranks, or over each block of so many.


def _join(
    arrays: list[Array], cuts: Mapping[int, Cut], ways: int, *, together: bool = True
) -> None:
    """Put whole arrays in the place of pieces.

    Args:
      together: lay them end to end; not where some are split over "model" and others are not.
    """
    dims = _dims(cuts, arrays)
    for part in _parts(dims, arrays, MOST_ELEMENTS if together else 0):
        blocks = _blocks(cuts[part[0]], ways)
        flat = jnp.concatenate([arrays[i].ravel() for i in part])
        every = lax.all_gather(flat, "data", axis_index_groups=blocks)
        for i, piece in zip(part, _cut(every, [arrays[i].shape for i in part])):
            arrays[i] = _joined(piece, dims[i])
    for i, cut in cuts.items():
        if cut.part:
            arrays[i] = cut.part_of(arrays[i])


def _scatter(
    arrays: list[Array], cuts: Mapping[int, Cut], ways: int, *, together: bool = True
) -> None:
    """Put each rank's piece of the ranks' sums in the place of whole arrays, of the sums of its
    block where there are several; see `_join`."""
    for i, cut in cuts.items():
        if cut.part:
            arrays[i] = cut.flat(arrays[i])
    dims = _dims(cuts, arrays)
    for part in _parts(dims, arrays, MOST_ELEMENTS if together else 0):
        blocks = _blocks(cuts[part[0]], ways)
        ranks = ways // cuts[part[0]].copies
        chunks = [_chunks(arrays[i], dims[i], ranks) for i in part]
        flat = jnp.concatenate([c.reshape(ranks, -1) for c in chunks], axis=1)
        reduced = lax.psum_scatter(flat, "data", axis_index_groups=blocks)
        for i, piece in zip(part, _cut(reduced, [c.shape[1:] for c in chunks])):
            arrays[i] = piece


def _blocks(cut: Cut, ways: int) -> list[list[int]] | None:
    """Neighbouring data ranks that share what is cut; None: all do. Equal for all cuts of a
    segment."""
    if cut.copies == 1:
        return None
    return np.arange(ways).reshape(cut.copies, -1).tolist()


def _sum_copies(arrays: list[Array], cuts: Sequence[Cut], ways: int) -> None:
    """Add up the blocks' sums of what every block of ranks has."""
    which = [i for i, cut in enumerate(cuts) if cut.copies > 1]
    if which:
        alike = np.arange(ways).reshape(cuts[which[0]].copies, -1).T.tolist()
        _replace(arrays, which, lambda flat: lax.psum(flat, "data", axis_index_groups=alike))


def _dims(cuts: Mapping[int, Cut], arrays: Sequence[Array]) -> dict[int, int]:
    """The dim of each array that is split; an array may lack the dim of layers."""
    return {i: data_dim(c.spec) - (len(c.spec) - arrays[i].ndim) for i, c in cuts.items()}


def _parts(which: Iterable[int], arrays: Sequence[Array], max_elements: int) -> Iterator[list[int]]:
    """Indices of arrays of one dtype that travel together, of at most so many elements."""
    part: list[int] = []
    size = 0
    for i in sorted(which, key=lambda i: str(arrays[i].dtype)):
        new_dtype = part and arrays[i].dtype != arrays[part[0]].dtype
        if part and (new_dtype or size + arrays[i].size > max_elements):
            yield part
            part, size = [], 0
        part.append(i)
        size += arrays[i].size
    if part:
        yield part


def _replace(
    arrays: list[Array], which: Sequence[int], collective: Callable[[Array], Array]
) -> None:
    """Apply a collective that keeps shapes to some of the arrays."""
    for part in _parts(which, arrays, MOST_ELEMENTS):
        flat = collective(jnp.concatenate([arrays[i].ravel() for i in part]))
        for i, piece in zip(part, _cut(flat, [arrays[i].shape for i in part])):
            arrays[i] = piece


def _cut(flat: Array, shapes: Sequence[tuple[int, ...]]) -> Iterator[Array]:
    """Pieces of the last dim, in their shapes; other dims lead."""
    start = 0
    for shape in shapes:
        stop = start + prod(shape)
        yield flat[..., start:stop].reshape(*flat.shape[:-1], *shape)
        start = stop


def _chunks(array: Array, dim: int, ways: int) -> Array:
    """[ways, ...]: the array cut along a dim."""
    shape = (*array.shape[:dim], ways, array.shape[dim] // ways, *array.shape[dim + 1 :])
    return jnp.moveaxis(array.reshape(shape), dim, 0)


def _joined(chunks: Array, dim: int) -> Array:
    """The inverse of `_chunks`."""
    moved = jnp.moveaxis(chunks, 0, dim)
    return moved.reshape(*moved.shape[:dim], -1, *moved.shape[dim + 2 :])
