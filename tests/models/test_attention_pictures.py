"""Pictures that see themselves whole, windows and scales: against a mask that is written down."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fields import packed_segments
from test_attention import make_qkv

from models import attention_gpu
from models.attention import attention, masked_attention, reach_of
from models.attention_kernels import Marks, Sight


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


def mask_of(segments, shown, window):
    """[items, queries, keys], token by token."""
    items, tokens = segments.shape
    seen = np.zeros((items, tokens, tokens), bool)
    for i in range(items):
        for q in range(tokens):
            last = q
            while (
                shown[i, q] and last + 1 < tokens and shown[i, last + 1]
                and segments[i, last + 1] == segments[i, q]
            ):  # fmt: skip
                last += 1
            keys = np.arange(last + 1)
            near = keys > q - window if window else np.full(len(keys), True)
            seen[i, q, : last + 1] = near & (segments[i, : last + 1] == segments[i, q])
    return seen


@functools.cache
def both(kernel, window, scale):
    @jax.jit
    def run(segments, reach, q, k, v):
        wave = jnp.sin(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)
        out, pull = jax.vjp(
            lambda *qkv: attention(
                *qkv, Marks(segments, reach), causal=True, kernel=kernel, window=window, scale=scale
            ),
            q,
            k,
            v,
        )
        return [out, *pull(wave)]

    return run


@pytest.mark.slow(first=4)
@pytest.mark.parametrize("kernel", ["xla", "pallas"])
@pytest.mark.parametrize(
    "items, tokens, window", [(1, 1, 0), (2, 9, 0), (2, 60, 7), (2, 129, 0), (1, 300, 33)]
)
def test_a_picture_sees_itself_whole(kernel, items, tokens, window):
    scale = 0.3
    q, k, v = make_qkv(items, tokens, 4, 2, 16)
    segments, _ = packed_segments(items, tokens, np.random.default_rng(tokens))
    shown = pictures_in(segments, tokens)
    reach = reach_of(shown, jnp.asarray(segments))
    seen = mask_of(segments, shown, window)
    wave = np.sin(np.arange(q.size, dtype=np.float32)).reshape(q.shape)

    def plain(q, k, v):
        return masked_attention(q, k, v, seen, scale)

    out, pull = jax.vjp(plain, q, k, v)
    for got, want in zip(both(kernel, window, scale)(segments, reach, q, k, v), [out, *pull(wave)]):
        real = segments[:, :, None, None] > 0  # what comes out for padding means nothing
        np.testing.assert_allclose(np.where(real, got, 0), np.where(real, want, 0), atol=2e-5)


def test_reach_ends_with_the_picture_and_the_segment():
    shown = np.array([[0, 1, 1, 0, 1, 1, 1, 1, 0, 0]], bool)
    segments = np.array([[1, 1, 1, 1, 1, 1, 2, 2, 2, 0]])
    want = [[0, 2, 2, 3, 5, 5, 7, 7, 8, 9]]
    np.testing.assert_array_equal(reach_of(shown, jnp.asarray(segments)), want)


@pytest.mark.parametrize("keys", [False, True])
@pytest.mark.parametrize("window", [0, 40])
def test_blocks_that_meet_hold_every_pair(keys, window):
    held, visited, T = 64, 32, 256
    segments, _ = packed_segments(2, T, np.random.default_rng(5))
    segments = segments.astype(np.int32)
    shown = pictures_in(segments, 2, at_most=90)
    marks = Marks(segments, np.asarray(reach_of(shown, jnp.asarray(segments))))
    start, stop = attention_gpu._spans(marks, T, held, visited, sees=Sight(True, window), keys=keys)
    seen = mask_of(segments, shown, window) & (segments[:, :, None] > 0)
    seen = seen.swapaxes(1, 2) if keys else seen
    meet = seen.reshape(2, T // held, held, T // visited, visited).any(axis=(2, 4))
    for row, i in np.ndindex(2, T // held):
        needed = np.flatnonzero(meet[row, i])
        assert not len(needed) or (start[row, i] <= needed[0] and stop[row, i] > needed[-1])
