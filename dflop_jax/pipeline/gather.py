"""Rows of features at the places that read them, and the gradient of that, on one device."""

from __future__ import annotations

from functools import reduce
from math import ceil, log, prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dflop_jax.contract import Array

# Rows that are added in one pass over all: passes are the logarithm to this base of the longest
# run, and each reads as many rows.
_ROWS_A_PASS = 8


def gather_features(features: Array, index: Array, weight: Array | None = None) -> Array:
    """features [..., width], index [..., sources] -> [..., width].

    `index` counts over the flattened rows of `features`; -1 gives zeros. A place with several
    sources is their sum, each times its `weight` (float32, of the index's shape).
    """
    flat = features.reshape(-1, features.shape[-1])
    parts: list[Array] = []
    for k in range(index.shape[-1]):
        place = index[..., k]
        rows = jnp.take(flat, place, axis=0, mode="clip")
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
    *rows, width = like.shape
    n, sources = prod(rows), index.shape[-1]
    dplaced, index = dplaced.reshape(-1, width), index.reshape(-1)
    reads = index >= 0
    if weight is not None:
        weight = weight.reshape(-1)
        reads &= weight != 0
    read = jnp.where(reads, index, n)
    order = jnp.argsort(read)
    places = order if sources == 1 else order // sources
    terms = jnp.take(dplaced, places, axis=0, mode="clip").astype(jnp.float32)
    if weight is not None:
        terms = terms * weight[order][:, None]
    read, features = jnp.take(read, order, mode="clip"), jnp.arange(n)
    # Who reads nothing stands at the end, for features that do not exist.
    first = jnp.searchsorted(read, features)
    is_read = jnp.take(read, first, mode="clip") == features
    sums = _run_sums(read, terms, max_readers or read.shape[0]).astype(like.dtype)
    sums = jnp.take(sums, first, axis=0, mode="clip")
    return jnp.where(is_read[:, None], sums, jnp.zeros_like(sums)).reshape(like.shape)


def _run_sums(keys: Array, rows: Array, longest: int) -> Array:
    """Rows [n, width] where the first of each run of equal keys, sorted [n], is the run's sum; a
    run has up to `longest`."""
    n, nothing = keys.shape[0], jnp.zeros_like(rows)
    keys_behind = jnp.concatenate([keys, jnp.full_like(keys, -1)])

    # In terms of lax, which is traced several times as fast as numpy's terms.
    def widen(rows: Array, step: Array) -> tuple[Array, None]:
        """Turn sums over up to `step` rows of a run into sums over _ROWS_A_PASS times as many."""
        total, rows_behind = rows, lax.concatenate([rows, nothing], 0)
        for ahead in range(1, _ROWS_A_PASS):
            start = lax.min(lax.mul(step, ahead), n)
            key = lax.dynamic_slice(keys_behind, (start,), keys.shape, allow_negative_indices=False)
            more = lax.dynamic_slice(
                rows_behind, (start, 0), rows.shape, allow_negative_indices=False
            )
            same = lax.broadcast_in_dim(lax.eq(key, keys), rows.shape, (0,))
            total = lax.add(total, lax.select(same, more, nothing))
        return total, None

    n_steps = ceil(round(log(max(longest, 2), _ROWS_A_PASS), 9))
    steps = np.power(_ROWS_A_PASS, np.arange(n_steps), dtype=np.int32)
    return lax.scan(widen, rows, jnp.asarray(steps))[0]
