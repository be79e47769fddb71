"""Attention, by XLA and by the GPU's kernels interpreted on the CPU, against every score under a
mask that is written down; and that samples in a row change no bit of each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from model_fields import packed_segments

from models.attention import attention, last_visible_tokens
from models.attention_kernels import TokenMask

BF16 = jnp.bfloat16


def mask_of(segments, causal=True, window=0, shown=None):
    """[items, queries, keys]: who sees whom. `shown` marks tokens of pictures, which see all of
    their own."""
    at = np.arange(segments.shape[1])
    same = segments[:, :, None] == segments[:, None]
    back = at[:, None] - at
    seen = np.broadcast_to(back >= 0, same.shape) if causal else np.ones(same.shape, bool)
    if shown is not None:
        begins = np.diff(np.where(shown, segments, -1), axis=1, prepend=-2) != 0
        run = begins.cumsum(1)
        seen = seen | (shown[:, :, None] & (run[:, :, None] == run[:, None]))
    return same & seen & (back < window) if window else same & seen


def dense(q, k, v, seen, scale=None, xp=np):
    """All scores of all heads, by their definition."""
    k, v = (xp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = xp.einsum("btnh,bsnh->bnts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = xp.where(seen[:, None], scores, -1e30)
    weights = xp.exp(scores - scores.max(-1, keepdims=True))
    return xp.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)


def make_qkv(items, tokens, heads, kv_heads, head_dim=4, seed=0):
    rng = np.random.default_rng(seed)
    counts = (heads, kv_heads, kv_heads)
    return [rng.normal(size=(items, tokens, n, head_dim)).astype(np.float32) for n in counts]


def pictures_in(segments, seed, at_most=40):
    """bool [items, tokens]: runs of pictures, some at a segment's ends."""
    rng = np.random.default_rng(seed)
    shown = np.zeros(segments.shape, bool)
    for row in shown:
        start = int(rng.integers(0, 4))
        while start < len(row):
            stop = start + int(rng.integers(1, at_most))
            row[start:stop] = True
            start = stop + int(rng.integers(1, at_most))
    return shown


def wave_like(x):
    return jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape).astype(x.dtype)


@functools.cache
def value_and_grads(kernel, causal, window=0, scale=None, n_keys=0):
    """One program for all rows of a shape; that of the kernels in a `shard_map`, as the engine has
    them."""

    def run(marks, wave, *qkv):
        how = {"causal": causal, "kernel": kernel, "window": window, "scale": scale}
        how |= {"n_keys": n_keys}
        out, pull = jax.vjp(lambda *qkv: attention(*qkv, marks, **how), *qkv)
        return [out, *pull(wave)]

    if kernel == "pallas":
        mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
        rows = P("data")
        run = jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"data"})
    return jax.jit(run)


def check(kernel, qkv, ids, causal, window=0, atol=1e-5, shown=None, scale=None, n_keys=0):
    """Outputs and gradients where tokens are; a kernel gives nothing at padding unless there are
    pictures."""
    marks = ids if shown is None else TokenMask(ids, last_visible_tokens(shown, jnp.asarray(ids)))
    run = value_and_grads(kernel, causal, window, scale, n_keys)
    found = run(marks, wave_like(qkv[0]), *qkv)
    given = [jnp.asarray(x, jnp.float32) for x in qkv]
    seen = mask_of(np.ones(qkv[0].shape[:2], int) if ids is None else ids, causal, window, shown)
    seen = seen & (np.arange(seen.shape[2]) < n_keys) if n_keys else seen
    wave = wave_like(qkv[0]).astype(jnp.float32)
    want = [np.zeros(qkv[0].shape), *(np.zeros(x.shape) for x in qkv)]
    if qkv[0].size:
        out, pull = jax.vjp(lambda *qkv: dense(*qkv, seen, scale, jnp), *given)
        want = [out, *pull(wave)]
    for x, y, z in zip(found, want, [qkv[0], *qkv], strict=True):
        assert (x.dtype, x.shape) == (z.dtype, z.shape)
        x, y = np.asarray(x, np.float32), np.asarray(y)
        if ids is not None:
            real = np.asarray(ids)[:, :, None, None] > 0
            x = x if kernel == "pallas" and shown is None else np.where(real, x, 0)
            y = np.where(real, y, 0)
        scale_of = max(1.0, np.abs(y).max(initial=0.0))
        np.testing.assert_allclose(x / scale_of, y / scale_of, atol=atol)


# (items, tokens, heads, kv heads, head dim), causal, window
PACKED = [
    ((0, 3, 2, 1, 4), True, 0), ((1, 1, 1, 1, 4), False, 0), ((2, 9, 4, 2, 4), True, 1),
    ((2, 9, 6, 1, 8), True, 0), ((2, 129, 3, 3, 72), False, 0), ((1, 700, 4, 2, 4), True, 0),
    ((2, 600, 4, 2, 16), True, 260), ((1, 128, 6, 2, 16), False, 0), ((2, 129, 6, 1, 4), True, 40),
    ((1, 300, 7, 1, 24), True, 0), ((2, 300, 4, 2, 16), True, 5), ((1, 700, 6, 2, 8), False, 0),
]  # fmt: skip


@pytest.mark.slow(first=14)
@pytest.mark.parametrize("kernel", ["xla", "pallas"])
@pytest.mark.parametrize("shape, causal, window", PACKED)
def test_packed_rows_and_rows_of_one_sample(shape, causal, window, kernel):
    qkv = make_qkv(*shape)
    ids, _ = packed_segments(*shape[:2], np.random.default_rng(3))
    check(kernel, qkv, ids, causal, window)
    check(kernel, qkv, None, causal, window)


# (items, tokens, heads, kv heads, head dim), keys
TAILS = [
    ((0, 8, 2, 1, 4), 5), ((1, 8, 1, 1, 4), 1), ((2, 136, 2, 1, 72), 129), ((1, 296, 4, 2, 8), 128),
    ((1, 160, 2, 2, 24), 153), ((2, 32, 4, 1, 16), 31),
]  # fmt: skip


@pytest.mark.slow(first=8)
@pytest.mark.parametrize("kernel", ["xla", "pallas"])
@pytest.mark.parametrize("shape, n_keys", TAILS)
def test_no_token_sees_padding_after_the_keys(shape, n_keys, kernel):
    check(kernel, make_qkv(*shape), None, False, n_keys=n_keys)


@pytest.mark.parametrize("kernel", ["xla", "pallas"])
@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
def test_padding_after_the_keys_changes_no_bit(dtype, kernel):
    """Neither output nor gradients of tokens; padding whose output is not read has none."""
    tokens, n_keys = 136, 131
    run = value_and_grads(kernel, False, n_keys=n_keys)
    a = [jnp.asarray(x, dtype) for x in make_qkv(2, tokens, 4, 2, 24, seed=0)]
    other = [jnp.asarray(50 * x, dtype) for x in make_qkv(2, tokens, 4, 2, 24, seed=1)]
    is_token = (jnp.arange(tokens) < n_keys)[None, :, None, None]
    wave = jnp.where(is_token, wave_like(a[0]), 0)
    before = jax.device_get(run(None, wave, *a))
    after = jax.device_get(run(None, wave, *(jnp.where(is_token, x, y) for x, y in zip(a, other))))
    for x, y in zip(before, after, strict=True):
        np.testing.assert_array_equal(x[:, :n_keys], y[:, :n_keys])
    for x, y in zip(before[1:], after[1:], strict=True):
        assert not x[:, n_keys:].any()
        assert not y[:, n_keys:].any()


@pytest.mark.parametrize(
    "lengths",
    [[300], [1] * 7 + [121, 128, 3], [64, 128, 64], [127, 1, 1, 127], [0, 200], [5, 0, 5, 300]],
)
def test_packings(lengths):
    """Samples that end at a block's edge, before and after it; of one token; padding between."""
    ids = np.concatenate([np.full(n, i if n else 0) for i, n in enumerate(lengths, 1)])
    ids = np.pad(ids, (0, 320 - len(ids))).astype(np.int32)[None]
    check("pallas", make_qkv(1, 320, 2, 1, 8), ids, True)


@pytest.mark.slow(first=5)
@pytest.mark.parametrize("kernel", ["xla", "pallas"])
@pytest.mark.parametrize(
    "items, tokens, window", [(1, 1, 0), (2, 9, 0), (2, 60, 7), (2, 129, 0), (1, 300, 33)]
)
def test_a_picture_sees_itself_whole(items, tokens, window, kernel):
    ids, _ = packed_segments(items, tokens, np.random.default_rng(tokens))
    shown = pictures_in(ids, tokens)
    check(kernel, make_qkv(items, tokens, 4, 2, 16), ids, True, window, 2e-5, shown, scale=0.3)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("head_dim, tokens", [(64, 260), (128, 260), (160, 260), (512, 70)])
def test_bfloat16_stays_near_float32(head_dim, tokens):
    """Within its rounding, 2^-8, where the reference itself is off by as much."""
    qkv = [jnp.asarray(x, BF16) for x in make_qkv(1, tokens, 4, 2, head_dim)]
    ids, _ = packed_segments(1, tokens, np.random.default_rng(4))
    check("pallas", qkv, ids, True, atol=2**-7)
    check("pallas", qkv, None, False, atol=2**-7)


@pytest.mark.parametrize("kernel", ["xla", "pallas"])
@pytest.mark.parametrize("dtype", [jnp.float32, BF16])
@pytest.mark.parametrize("causal", [False, True])
def test_changing_one_sample_leaves_the_others_bit_identical(causal, dtype, kernel):
    ids = np.repeat(np.array([[1, 2, 3, 0]], np.int32), [70, 100, 60, 50], axis=1)
    run = value_and_grads(kernel, causal)
    a = [jnp.asarray(x, dtype) for x in make_qkv(1, 280, 4, 2, 16, seed=0)]
    other = [jnp.asarray(50 * x, dtype) for x in make_qkv(1, 280, 4, 2, 16, seed=1)]
    wave = wave_like(a[0])
    before = jax.device_get(run(ids, wave, *a))
    for changed in range(4):
        move = ids[0] == changed
        b = [jnp.where(move[None, :, None, None], y, x) for x, y in zip(a, other)]
        for x, y in zip(before, jax.device_get(run(ids, wave, *b)), strict=True):
            np.testing.assert_array_equal(x[0, ~move], y[0, ~move])
            assert changed == 0 or not np.array_equal(x[0, move], y[0, move])


def test_what_is_outside_of_a_window_is_not_computed():
    q, k, v = make_qkv(1, 1024, 2, 1)

    def flops(window):
        run = jax.jit(lambda q, k, v: attention(q, k, v, None, causal=True, window=window))
        return run.lower(q, k, v).compile().cost_analysis()["flops"]

    # Blocks of 256 queries see 256 + 255 keys at most, without a window 640 on average.
    assert flops(256) < 0.8 * flops(0)
