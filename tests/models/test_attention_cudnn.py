"""What is given to cuDNN and made of its answer: the library is stood in for by XLA's attention of
the pieces that the places describe."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fields import packed_segments
from test_attention import make_qkv, wave_like

from models import attention_cudnn
from models.attention import attention
from models.attention_split import AttentionKernel, run_split

# ---- a library that computes what cuDNN is documented to: NaN where no piece is ----


def covered(shape, rows, places):
    """int [rows, tokens]: numbers of the pieces that lengths and places describe, else 0."""
    B, T, N, H = shape
    if not rows:
        return jnp.ones((B, T), jnp.int32)
    lengths, again = rows[:2]
    starts = (
        jnp.arange(B) * T if len(rows) == 2 else rows[places].ravel()[: lengths.size] // (N * H)
    )
    token = jnp.arange(B * T)[:, None]
    lengths = jnp.where(lengths == again, lengths, 0).ravel()
    inside = (starts[None] <= token) & (token < (starts + lengths)[None])
    numbers = jnp.where(inside.any(1), jnp.argmax(inside, 1) + 1, 0)
    return numbers.astype(jnp.int32).reshape(B, T)


def library(q, k, v, rows, causal, scale):
    """(the attention of the pieces, where they are)."""
    ids, key_ids = covered(q.shape, rows, 2), covered(k.shape, rows, 3)
    run = partial(attention, token_mask=ids, causal=causal, kernel="xla", scale=scale)
    return run, ((ids > 0) & (ids == key_ids))[:, :, None, None]


def library_forward(q, k, v, rows, causal, scale):
    run, has_piece = library(q, k, v, rows, causal, scale)
    stats = jnp.zeros((rows[0].size if rows else len(q), q.shape[2], q.shape[1]))
    return jnp.where(has_piece, run(q, k, v), jnp.full_like(q, jnp.nan)), stats


def library_backward(q, k, v, rows, stats, out, dout, causal, scale, seed):
    run, has_piece = library(q, k, v, rows, causal, scale)
    want, pull = jax.vjp(run, q, k, v)
    same = jnp.abs(jnp.where(has_piece, want - out, 0.0)).max() < 1e-5
    grads = pull(jnp.where(has_piece, dout, jnp.zeros_like(dout)))
    return tuple(jnp.where(has_piece & same, g, jnp.full_like(g, jnp.nan)) for g in grads)


@pytest.fixture
def by_library(monkeypatch):
    monkeypatch.setattr(attention_cudnn, "call_forward", library_forward)
    monkeypatch.setattr(attention_cudnn, "call_backward", library_backward)


def check(qkv, ids, causal):
    """Output and gradients."""
    kernel = AttentionKernel(
        attention_cudnn.forward, attention_cudnn.backward, causal, True, qkv[0].shape[-1] ** -0.5
    )

    def both(function):
        out, pull = jax.vjp(function, *qkv)
        return [out, *pull(wave_like(out))]

    plain = partial(attention, token_mask=ids, causal=causal, kernel="xla")
    found = jax.jit(lambda: both(lambda *a: run_split(kernel, *a, ids)))()
    for x, y in zip(found, jax.jit(lambda: both(plain))(), strict=True):
        y = y if ids is None else np.where(np.asarray(ids)[:, :, None, None] > 0, y, 0)
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("slots", [1, 16])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_rows(by_library, monkeypatch, causal, slots):
    """Also with more pieces than slots, which the project's kernels take over; a gap in a row, an
    empty row, and an id at the end of a row and at the begin of the next one."""
    monkeypatch.setattr(attention_cudnn, "SEGMENTS_PER_ROW", slots)
    ids, _ = packed_segments(4, 130, np.random.default_rng(3))
    ids[0, 120:], ids[1, :10] = 7, 7
    ids[1, 30:50], ids[2] = 0, 0
    ids[1, 50:] += 20 * (ids[1, 50:] > 0)  # another piece after the gap
    check(make_qkv(4, 130, 6, 2, 8), ids, causal)


@pytest.mark.parametrize("tokens", [1, 64, 73])
def test_rows_of_one_piece(by_library, tokens):
    check(make_qkv(2, tokens, 4, 4, 8), None, causal=False)
    check(make_qkv(1, tokens, 4, 2, 8), None, causal=True)


def test_jax_binds_cudnn_as_is_known():
    """If this fails, jax has changed and packed rows no longer run by cuDNN: see the module."""
    assert attention_cudnn.AVAILABLE


# ---- what XLA is told ----


def configurations(kernel):
    """What the calls of two equal layers' gradients say to XLA, lowered for a GPU."""
    q = jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.bfloat16)
    once = partial(attention, causal=True, kernel=kernel, chip="sm_90")

    def loss(q):
        return jnp.sum(once(once(q, q, q, None), q, q, None).astype(jnp.float32))

    lowered = jax.jit(jax.grad(loss)).trace(q).lower(lowering_platforms=("cuda",))
    calls = re.findall(r"@__cudnn\$(\w+)\(.*?backend_config = \"(.*?)\", ", lowered.as_text())
    return [(name, "force_deterministic" in text) for name, text in calls]


def test_all_exact_backward_calls_say_that_they_add_up_in_order():
    """XLA itself writes it into the first of equal ones, and the program fails on the others."""
    forward, backward = ("fmhaSoftmax", False), ("fmhaSoftmaxBackward", True)
    assert sorted(configurations("auto")) == [forward, forward, backward, backward]
    assert ("fmhaSoftmaxBackward", True) not in configurations("cudnn")
    assert len(configurations("cudnn")) == 4
