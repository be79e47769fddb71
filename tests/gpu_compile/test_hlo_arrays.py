"""Arrays of pairs of tokens, in programs compiled here."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from dflop_jax.gpu_compile.hlo_text import pair_arrays

HEADS, TOKENS, SIZE, BLOCK = 2, 96, 4, 32


def dense(x):
    """Attention of every token to all of its row."""
    return jax.nn.softmax(x @ x.swapaxes(1, 2), axis=-1) @ x


def in_a_loop(x):
    return jax.lax.fori_loop(0, 3, lambda _, x: dense(x), x)


def by_block(x):
    """Attention of every token, of whose scores only one block is kept at a time."""

    def block(queries):
        return jax.nn.softmax(jnp.einsum("hqd,hkd->hqk", queries, x), axis=-1) @ x

    queries = x.reshape(HEADS, -1, BLOCK, SIZE).swapaxes(0, 1)
    return jax.lax.map(block, queries).swapaxes(0, 1).reshape(x.shape)


SCORES = f"f32[{HEADS},{TOKENS},{TOKENS}]"


@pytest.mark.parametrize(
    ("function", "found"),
    [(dense, SCORES), (in_a_loop, SCORES), (by_block, ""), (jnp.tanh, "")],
)
def test_scores_are_found_where_they_are_kept(function, found):
    x = jax.ShapeDtypeStruct((HEADS, TOKENS, SIZE), jnp.float32)
    text = jax.jit(function).lower(x).compile().as_text()
    arrays = pair_arrays(text, TOKENS)
    assert found in arrays if found else not arrays


def test_one_dim_as_long_as_a_row_is_no_pair():
    weights = jax.ShapeDtypeStruct((4, 64, TOKENS), jnp.float32)
    text = jax.jit(partial(jnp.sum, axis=1)).lower(weights).compile().as_text()
    assert not pair_arrays(text, TOKENS)
