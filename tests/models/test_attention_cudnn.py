"""What is given to cuDNN and made of its answer. The library is replaced by its definition, which
computes gradients from the output and the log-sums that it is given."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_attention import make_qkv, wave_like

from models import attention_cudnn, attention_gpu
from models.attention import attention
from models.attention_split import AttentionKernel, run_split

# ---- a library as cuDNN is documented: NaN past the end of a row ----


def scores_of(options, q, k, lengths):
    scale, causal = options
    is_token = jnp.arange(q.shape[1])[None] < lengths[:, None]
    seen = is_token[:, :, None] & is_token[:, None]
    seen = seen & jnp.tri(q.shape[1], dtype=bool)[None] if causal else seen
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = scale * jnp.einsum("btnh,bsnh->bnts", q, k)
    return jnp.where(seen[:, None], scores, -jnp.inf), is_token


def library_forward(options, q, k, v, lengths):
    scores, is_token = scores_of(options, q, k, lengths)
    log_sum = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - log_sum[..., None])
    out = jnp.einsum("bnts,bsnh->btnh", weights, jnp.repeat(v, q.shape[2] // v.shape[2], axis=2))
    out = jnp.where(is_token[:, :, None, None], out, jnp.nan)
    log_sum = jnp.where(is_token[:, None], log_sum, jnp.nan)
    return out, (q, k, v, lengths, log_sum, out)


def library_backward(options, saved, dout):
    q, k, v, lengths, log_sum, out = saved
    wide_k, wide_v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores, is_token = scores_of(options, q, k, lengths)
    weights = jnp.where(is_token[:, None, :, None], jnp.exp(scores - log_sum[..., None]), 0)
    of_values = jnp.einsum("btnh,bsnh->bnts", dout, wide_v)
    dscores = options[0] * weights * (of_values - jnp.sum(dout * out, -1).swapaxes(1, 2)[..., None])
    grads = [
        jnp.einsum("bnts,bsnh->btnh", dscores, wide_k),
        jnp.einsum("bnts,btnh->bsnh", dscores, q),
        jnp.einsum("bnts,btnh->bsnh", weights, dout),
    ]
    by_group = [x.reshape(*k.shape[:3], -1, k.shape[3]).sum(3) for x in grads[1:]]
    return *(jnp.where(is_token[:, :, None, None], x, jnp.nan) for x in (grads[0], *by_group)), None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_library(options, q, k, v, lengths):
    return library_forward(options, q, k, v, lengths)[0]


run_library.defvjp(library_forward, library_backward)


def library(q, k, v, *, scale, is_causal, query_seq_lengths, key_value_seq_lengths, implementation):
    assert query_seq_lengths is key_value_seq_lengths
    assert implementation == "cudnn"
    lengths = query_seq_lengths
    lengths = jnp.full(len(q), q.shape[1], jnp.int32) if lengths is None else lengths
    return run_library((scale, is_causal), q, k, v, lengths)


@pytest.mark.parametrize("backward", [attention_cudnn.backward, attention_gpu.backward])
@pytest.mark.parametrize("tokens, causal", [(1, False), (128, True), (73, False), (200, True)])
def test_rows_of_one_segment(monkeypatch, tokens, causal, backward):
    monkeypatch.setattr(jax.nn, "dot_product_attention", library)
    qkv = make_qkv(2, tokens, 4, 2, 8)
    kernel = AttentionKernel(attention_cudnn.forward, backward, causal, True, 0.4)

    def both(function):
        out, pull = jax.vjp(function, *qkv)
        return [out, *pull(wave_like(out))]

    plain = partial(attention, token_mask=None, causal=causal, kernel="xla", scale=0.4)
    found = jax.jit(lambda: both(lambda *a: run_split(kernel, *a, None)))()
    for x, y in zip(found, jax.jit(lambda: both(plain))(), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_backward_runs_no_forward_again(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", library)
    q = jnp.zeros((1, 8, 2, 8))
    options = {"causal": False, "interpret": True, "scale": 1.0}
    run = jax.jit(partial(attention_cudnn.backward, **options))
    log_sum = jnp.zeros((1, 2, attention_gpu.BLOCK))
    text = run.lower(q, q, q, None, q, log_sum, q).compile().as_text()
    assert "exponential" in text
    assert " log(" not in text
