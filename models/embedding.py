"""Looks up rows of a table by token, with a gradient that is equal to the bit in every run."""

from __future__ import annotations

from math import ceil, log

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
ROWS_PER_PASS = 8  # rows that one pass over all rows adds


@jax.custom_vjp
def embed(table: Array, tokens: Array) -> Array:
    """Return rows [..., width] of a table [vocab, width]; tokens out of range get the nearest row.

    The gradients of equal tokens are summed in float32 in a fixed order. A scatter would add them
    in the order in which a GPU's threads arrive.
    """
    return jnp.take(table, tokens, axis=0, mode="clip")


def _forward(table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    # A slice without columns: it carries the number of rows and the dtype.
    return embed(table, tokens), (table[:, :0], tokens)


def _backward(residuals: tuple[Array, Array], dx: Array) -> tuple[Array, None]:
    table_like, tokens = residuals
    vocab, width = table_like.shape[0], dx.shape[-1]
    tokens = jnp.clip(tokens.reshape(-1), 0, vocab - 1)
    order = jnp.argsort(tokens)
    tokens = tokens[order]
    sums = run_sums(tokens, dx.reshape(-1, width)[order].astype(jnp.float32))
    row_index = jnp.arange(tokens.shape[0])
    first = (row_index == 0) | (tokens != tokens.at[row_index - 1].get(mode="clip"))
    # Target rows are unique; rows that are not a sum get an index out of range.
    target_row = jnp.where(first, tokens, vocab + row_index)
    zeros = jnp.zeros((vocab, width), table_like.dtype)
    return zeros.at[target_row].set(
        sums.astype(table_like.dtype), mode="drop", unique_indices=True
    ), None


embed.defvjp(_forward, _backward)


def run_sums(keys: Array, rows: Array) -> Array:
    """Return rows [n, width]; the first of each run of equal sorted `keys` is the run's sum."""
    n, nothing = keys.shape[0], jnp.zeros_like(rows)
    keys_behind = jnp.concatenate([keys, jnp.full_like(keys, -1)])

    # Written with lax, which traces several times as fast as jnp.
    def widen(rows: Array, step: Array) -> tuple[Array, None]:
        """Turn sums over up to `step` rows of a run into sums over ROWS_PER_PASS times as many."""
        total, rows_behind = rows, lax.concatenate([rows, nothing], 0)
        for distance in range(1, ROWS_PER_PASS):
            start = lax.min(lax.mul(step, distance), n)
            key = lax.dynamic_slice(keys_behind, (start,), keys.shape, allow_negative_indices=False)
            following = lax.dynamic_slice(
                rows_behind, (start, 0), rows.shape, allow_negative_indices=False
            )
            same_key = lax.broadcast_in_dim(lax.eq(key, keys), rows.shape, (0,))
            total = lax.add(total, lax.select(same_key, following, nothing))
        return total, None

    n_passes = ceil(log(max(n, 2), ROWS_PER_PASS))
    steps = np.power(ROWS_PER_PASS, np.arange(n_passes), dtype=np.int32)
    return lax.scan(widen, rows, jnp.asarray(steps))[0]
