"""Rows of features at the places that read them, and the gradient of that, on one device."""

from __future__ import annotations

from functools import reduce
from math import ceil, log

import jax
import jax.numpy as jnp

from dflop_jax.contract import Array

# Rows that are added in one pass over all: passes are the logarithm to this base of the longest
# run, and each reads as many rows.
_ROWS_A_PASS = 8


def gather_features(features: Array, index: Array, weight: Array | None = None) -> Array:
    """features [M, rows, tokens, width], index [M, places, length, sources] ->
    [M, places, length, width].

    `index` counts over the flattened (rows, tokens) of its microbatch; -1 gives zeros. A place
    with several sources is their sum, each times its `weight` (float32, of the index's shape).
    """
    flat = features.reshape(features.shape[0], -1, features.shape[-1])
    parts: list[Array] = []
    for k in range(index.shape[-1]):
        place = index[..., k]
        rows = jax.vmap(lambda f, i: jnp.take(f, jnp.maximum(i, 0), axis=0))(flat, place)
        if weight is not None:
            rows = rows * weight[..., k, None].astype(rows.dtype)
        parts.append(jnp.where((place >= 0)[..., None], rows, jnp.zeros_like(rows)))
    return reduce(jnp.add, parts)


def scatter_gradient(
    like: jax.ShapeDtypeStruct,
    dplaced: Array,
    index: Array,
    weight: Array | None = None,
    *,
    max_readers: int | None = None,
) -> Array:
    """Transpose of `gather_features` for features of shape `like`, summed in float32.

    The same to the bit in every run: a scatter would add in the order in which a GPU's threads
    come. What a place reads with weight 0 gets nothing from it. `max_readers`: places that may
    read a feature, None: all.
    """
    m, rows, tokens, width = like.shape
    n, sources = rows * tokens, index.shape[-1]

    def of_microbatch(dplaced: Array, index: Array, weight: Array | None) -> Array:
        reads = index >= 0 if weight is None else (index >= 0) & (weight != 0)
        read = jnp.where(reads, index, n)
        order = jnp.argsort(read)
        terms = dplaced[order // sources].astype(jnp.float32)
        if weight is not None:
            terms = terms * weight[order][:, None]
        read = read[order]
        # Who reads nothing stands at the end, for features that do not exist.
        first = jnp.searchsorted(read, jnp.arange(n))
        is_read = read.at[first].get(mode="clip") == jnp.arange(n)
        sums = _run_sums(read, terms, max_readers or read.shape[0]).astype(like.dtype)
        sums = sums.at[first].get(mode="clip")
        return jnp.where(is_read[:, None], sums, jnp.zeros_like(sums))

    flat = index.reshape(m, -1), None if weight is None else weight.reshape(m, -1)
    return jax.vmap(of_microbatch)(dplaced.reshape(m, -1, width), *flat).reshape(like.shape)


def _run_sums(keys: Array, rows: Array, longest: int) -> Array:
    """Rows [n, width] where the first of each run of equal keys, sorted [n], is the run's sum; a
    run has up to `longest`."""
    n = keys.shape[0]
    place = jnp.arange(n)

    def widen(rows: Array, step: Array) -> tuple[Array, None]:
        """Turn sums over up to `step` rows of a run into sums over _ROWS_A_PASS times as many."""
        total = rows
        for ahead in range(1, _ROWS_A_PASS):
            other = jnp.minimum(place + ahead * step, n)
            same = keys.at[other].get(mode="fill", fill_value=-1) == keys
            more = rows.at[other].get(mode="clip")
            total = total + jnp.where(same[:, None], more, jnp.zeros_like(more))
        return total, None

    n_steps = ceil(round(log(max(longest, 2), _ROWS_A_PASS), 9))
    return jax.lax.scan(widen, rows, _ROWS_A_PASS ** jnp.arange(n_steps))[0]
