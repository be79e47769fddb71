"""What is given to tokamax's kernel and made of its answer. The kernel, which only a Hopper GPU
runs, is replaced by its definition: dense attention over ranges of keys."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fields import packed_segments
from test_attention import make_qkv, mask_of, pictures_in, wave_like

from models import attention_gpu, attention_tokamax
from models.attention import attention, last_visible_tokens
from models.attention_kernels import TokenMask
from models.attention_split import AttentionKernel, run_split

CASES = [(True, 0, False), (True, 7, False), (True, 0, True), (True, 40, True), (False, 0, False)]


def marks_of(tokens, pictures):
    ids, _ = packed_segments(2, tokens, np.random.default_rng(tokens))
    ids[0, :5], ids[1, tokens // 2 :] = 0, 0
    shown = pictures_in(ids, 2) if pictures else None
    reach = last_visible_tokens(shown, jnp.asarray(ids)) if pictures else None
    return ids, shown, TokenMask(jnp.asarray(ids), reach)


def sees(starts, ends, tokens):
    keys = np.arange(tokens)[None, None]
    return (keys >= starts[:, :, None]) & (keys < ends[:, :, None])


@pytest.mark.parametrize("tokens", [1, 9, 300])
@pytest.mark.parametrize("causal, window, pictures", CASES)
def test_ranges_are_what_a_token_sees(causal, window, pictures, tokens):
    ids, shown, marks = marks_of(tokens, pictures)
    starts, ends = map(np.asarray, attention_tokamax.key_ranges(marks, causal, window))
    seen = mask_of(ids, causal, window, shown)
    real = ids > 0
    np.testing.assert_array_equal(sees(starts, ends, tokens)[real], seen[real])
    if causal:  # or the kernel waits for ever: see `key_ranges`
        assert (starts <= np.arange(tokens)).all()
    else:
        assert not sees(starts, ends, tokens)[~real].any()


def run_dense(q, k, v, starts, ends, causal, scale):
    assert q.shape[1] % attention_gpu.BLOCK == 0
    tokens = q.shape[1]
    keys = jnp.arange(tokens)[None, None]
    seen = keys >= starts[:, :, None]
    seen &= keys <= keys.swapaxes(1, 2) if causal else keys < ends[:, :, None]
    group = q.shape[2] // k.shape[2]
    scores = scale * jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, group, axis=2))
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    peak = scores.max(-1)
    weights = jnp.where(seen[:, None], jnp.exp(scores - peak[..., None]), 0)
    total = weights.sum(-1)
    out = jnp.einsum("bnts,bsnh->btnh", weights, jnp.repeat(v, group, axis=2))
    return out / jnp.where(total > 0, total, 1).swapaxes(1, 2)[..., None], peak, total


@pytest.mark.parametrize("tokens", [9, 300])
@pytest.mark.parametrize("causal, window, pictures", CASES)
def test_forward_fits_the_backward_of_the_kernels(monkeypatch, causal, window, pictures, tokens):
    monkeypatch.setattr(attention_tokamax, "_run_kernel", run_dense)
    _, _, marks = marks_of(tokens, pictures)
    qkv = make_qkv(2, tokens, 4, 2, 8)
    is_real = jnp.asarray(marks.segment_ids > 0, jnp.float32)[:, :, None, None]
    kernel = AttentionKernel(
        attention_tokamax.forward, attention_gpu.backward, causal, True, 0.4, window
    )

    def both(function):
        out, pull = jax.vjp(function, *qkv)
        return [x * is_real for x in (out, *pull(wave_like(out) * is_real))]

    options = {"causal": causal, "window": window, "kernel": "xla", "scale": 0.4}
    plain = partial(attention, token_mask=marks, **options)
    found = jax.jit(lambda: both(lambda *a: run_split(kernel, *a, marks)))()
    for x, y in zip(found, jax.jit(lambda: both(plain))(), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)
