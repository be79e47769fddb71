"""Attention against numpy run on each sample alone, and its invariants under packing."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fields import packed_segments

from models.attention import attention, masked_attention


def oracle(q, k, v, segments, causal, window=0):
    """Each head of each sample of each row alone, in float64."""
    out = np.zeros(q.shape)
    group = q.shape[2] // k.shape[2]
    for row, head in itertools.product(range(q.shape[0]), range(q.shape[2])):
        for segment in np.unique(segments[row]):
            at = np.flatnonzero(segments[row] == segment)
            queries, keys = q[row, at, head], k[row, at, head // group]
            scores = queries @ keys.T / np.sqrt(q.shape[-1])
            if causal:
                scores[np.triu_indices(len(at), 1)] = -np.inf
            if window:
                scores[np.tril_indices(len(at), -window)] = -np.inf
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[row, at, head] = weights @ v[row, at, head // group]
    return out


def make_qkv(items, tokens, heads, kv_heads, head_dim=4, seed=0):
    rng = np.random.default_rng(seed)
    counts = (heads, kv_heads, kv_heads)
    return [rng.normal(size=(items, tokens, n, head_dim)).astype(np.float32) for n in counts]


@pytest.mark.parametrize("items, tokens", [(0, 3), (1, 1), (2, 9), (1, 16), (2, 129), (1, 700)])
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 2), (6, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_matches_samples_run_alone(items, tokens, heads, kv_heads, causal):
    q, k, v = make_qkv(items, tokens, heads, kv_heads)
    segments, _ = packed_segments(items, tokens, np.random.default_rng(3))
    found = jax.jit(attention, static_argnames="causal")(q, k, v, segments, causal=causal)
    np.testing.assert_allclose(found, oracle(q, k, v, segments, causal), atol=1e-5)


@pytest.mark.parametrize(
    "tokens, window", [(1, 1), (9, 1), (9, 4), (129, 40), (300, 5), (600, 260)]
)
def test_a_window_ends_what_a_token_sees(tokens, window):
    q, k, v = make_qkv(2, tokens, 4, 2)
    for segments in (
        np.ones((2, tokens), int),
        packed_segments(2, tokens, np.random.default_rng(3))[0],
    ):
        want = oracle(q, k, v, segments, True, window)

        def found(q, k, v, segments=segments):
            return attention(q, k, v, segments, causal=True, window=window)

        np.testing.assert_allclose(jax.jit(found)(q, k, v), want, atol=1e-5)

    def masked(q, k, v):
        at = np.arange(tokens)
        seen = (at[:, None] >= at) & (at[:, None] - at < window)
        seen = seen[None] & (segments[:, :, None] == segments[:, None])
        return masked_attention(q, k, v, seen)

    wave = jnp.sin(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)
    back = [jax.jit(lambda *qkv, f=f: jax.vjp(f, *qkv)[1](wave)) for f in (found, masked)]
    for got, want in zip(*(run(q, k, v) for run in back), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_what_is_outside_of_a_window_is_not_computed():
    q, k, v = make_qkv(1, 1024, 2, 1)

    def flops(window):
        run = jax.jit(lambda q, k, v: attention(q, k, v, None, causal=True, window=window))
        return run.lower(q, k, v).compile().cost_analysis()["flops"]

    # Blocks of 256 queries see 256 + 255 keys at most, without a window 640 on average.
    assert flops(256) < 0.8 * flops(0)


def test_without_segments_a_row_is_one_sample():
    q, k, v = make_qkv(2, 7, 4, 2)
    found = attention(q, k, v, None, causal=False)
    np.testing.assert_allclose(found, oracle(q, k, v, np.ones((2, 7)), False), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_changing_one_sample_leaves_the_others_bit_identical(dtype, causal):
    segments = jnp.array([[1, 1, 1, 2, 2, 2, 2, 3, 3, 0, 0, 0]], jnp.int32)

    @jax.jit
    def value_and_grads(qkv):
        wave = jnp.sin(jnp.arange(48, dtype=jnp.float32)).reshape(1, 12, 4, 1)
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, segments, causal=causal), *qkv)
        return [out, *pull(jnp.broadcast_to(wave, out.shape).astype(out.dtype))]

    a = [x.astype(dtype) for x in make_qkv(1, 12, 4, 2, seed=0)]
    other = [(50 * x).astype(dtype) for x in make_qkv(1, 12, 4, 2, seed=1)]
    before = jax.device_get(value_and_grads(a))
    for changed in (1, 2, 3, 0):
        move = np.asarray(segments[0] == changed)
        b = [np.where(move[None, :, None, None], y, x) for x, y in zip(a, other)]
        for x, y in zip(before, jax.device_get(value_and_grads(b)), strict=True):
            np.testing.assert_array_equal(x[0, ~move], y[0, ~move])
            assert not np.array_equal(x[0, move], y[0, move])


def plain(q, k, v, segments):
    """Causal attention with all weights at once, for jax to differentiate."""
    group, tokens = q.shape[2] // k.shape[2], q.shape[1]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1])
    mask = jnp.tri(tokens, dtype=bool)[None] & (segments[:, :, None] == segments[:, None])
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


@pytest.mark.parametrize("items, tokens", [(0, 200), (2, 128), (2, 129), (1, 700)])
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (6, 2)])
def test_gradients_of_long_rows(items, tokens, heads, kv_heads):
    qkv = make_qkv(items, tokens, heads, kv_heads, head_dim=8)
    segments, _ = packed_segments(items, tokens, np.random.default_rng(3))
    wave = np.sin(np.arange(items * tokens * heads * 8)).reshape(items, tokens, heads, 8)

    def loss(function):
        return lambda *qkv: (function(*qkv) * wave).sum()

    own = jax.grad(loss(lambda q, k, v: attention(q, k, v, segments, causal=True)), (0, 1, 2))
    for found, expected in zip(
        jax.jit(own)(*qkv),
        jax.jit(jax.grad(loss(lambda q, k, v: plain(q, k, v, segments)), (0, 1, 2)))(*qkv),
    ):
        scale = max(1.0, np.abs(expected).max(initial=0.0))
        np.testing.assert_allclose(found / scale, expected / scale, atol=1e-5)


def test_long_rows_keep_samples_apart_to_the_bit():
    segments = jnp.repeat(jnp.array([[1, 2, 3, 0]], jnp.int32), 75, axis=1)

    @jax.jit
    def value_and_grads(q, k, v):
        out, pull = jax.vjp(lambda *qkv: attention(*qkv, segments, causal=True), q, k, v)
        return [out, *pull(jnp.sin(out))]

    a, other = make_qkv(1, 300, 4, 2, seed=0), make_qkv(1, 300, 4, 2, seed=1)
    before = jax.device_get(value_and_grads(*a))
    for changed in range(4):
        move = np.asarray(segments[0] == changed)
        b = [np.where(move[None, :, None, None], 50 * y, x) for x, y in zip(a, other)]
        for x, y in zip(before, jax.device_get(value_and_grads(*b)), strict=True):
            np.testing.assert_array_equal(x[0, ~move], y[0, ~move])
            assert not np.array_equal(x[0, move], y[0, move])


def test_rows_of_padding_are_finite():
    q, k, v = make_qkv(2, 5, 4, 2)
    nothing = jnp.zeros((2, 5), jnp.int32)

    def total(q, k, v):
        return attention(q, k, v, nothing, causal=True).sum()

    value, grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))(q, k, v)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in grads)
