"""Embeddings and their gradient against numpy, and what a GPU would be free to reorder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.embedding import embed
from models.llava import build

VOCAB, WIDTH = 11, 4


def gradient(table, tokens, dx):
    return jax.vjp(lambda t: embed(t, tokens), table)[1](dx)[0]


@pytest.mark.parametrize("n", [0, 1, 2, 7, 8, 9, 64, 65, 700])
@pytest.mark.parametrize("spread", [1, 3, 2 * VOCAB], ids=["one token", "few", "out of range too"])
def test_equal_tokens_add_up(n, spread):
    rng = np.random.default_rng(n)
    table = rng.normal(size=(VOCAB, WIDTH)).astype(np.float32)
    tokens = rng.integers(0, spread, (1, n)).astype(np.int32) - (spread > VOCAB) * 3
    # Whole numbers: their float32 sums are exact in any order.
    dx = rng.integers(-9, 9, (1, n, WIDTH)).astype(np.float32)
    want = np.zeros_like(table)
    taken = np.clip(tokens, 0, VOCAB - 1)
    np.add.at(want, taken, dx)
    np.testing.assert_array_equal(embed(table, tokens), table[taken])
    np.testing.assert_array_equal(jax.jit(gradient)(table, tokens, dx), want)


def test_bfloat16_gradients_are_summed_in_float32():
    tokens, dx = jnp.zeros((1, 513), jnp.int32), jnp.ones((1, 513, WIDTH), jnp.bfloat16)
    got = jax.vjp(lambda t: embed(t, tokens).astype(jnp.bfloat16), jnp.ones((VOCAB, WIDTH)))[1](dx)
    np.testing.assert_array_equal(got[0][0], 513.0)  # bfloat16 ends at 256
    assert not np.any(got[0][1:])


def test_no_scatter_adds_in_an_order_of_its_own():
    """Only one that meets every row at most once is left in the LLM's entry, and none adds."""
    llm = build("nano").modules["llm"]
    params = jax.eval_shape(lambda k: llm.init("entry", k), jax.random.key(0))
    batch = {n: llm.field_spec(n, 1, 64) for n in llm.inputs["entry"]}

    def backward(params, batch, dx):
        return jax.vjp(lambda p: llm.entry(p, batch), params)[1](dx)

    dx = jax.eval_shape(llm.entry, params, batch)
    text = jax.jit(backward).lower(params, batch, dx).as_text()
    assert text.count('"stablehlo.scatter"') == text.count("unique_indices = true") == 1
