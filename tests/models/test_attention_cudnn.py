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

# ---- a library as cuDNN is documented: NaN in gradients past the last key ----


def scores_of(options, q, k, lengths):
    scale, causal = options
    is_key = jnp.arange(k.shape[1])[None] < lengths[:, None]
    seen = is_key[:, None] & (jnp.tri(q.shape[1], dtype=bool)[None] if causal else True)
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = scale * jnp.einsum("btnh,bsnh->bnts", q, k)
    return jnp.where(seen[:, None], scores, -jnp.inf), is_key


def library_forward(options, q, k, v, lengths):
    scores, _ = scores_of(options, q, k, lengths)
    log_sum = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - log_sum[..., None])
    out = jnp.einsum("bnts,bsnh->btnh", weights, jnp.repeat(v, q.shape[2] // v.shape[2], axis=2))
    return out, (q, k, v, lengths, log_sum, out)


def library_backward(options, saved, dout):
    q, k, v, lengths, log_sum, out = saved
    wide_k, wide_v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores, is_key = scores_of(options, q, k, lengths)
    weights = jnp.exp(scores - log_sum[..., None])
    of_values = jnp.einsum("btnh,bsnh->bnts", dout, wide_v)
    dscores = options[0] * weights * (of_values - jnp.sum(dout * out, -1).swapaxes(1, 2)[..., None])
    dq = jnp.einsum("bnts,bsnh->btnh", dscores, wide_k)
    grads = [
        jnp.einsum("bnts,btnh->bsnh", dscores, q), jnp.einsum("bnts,btnh->bsnh", weights, dout)
    ]  # fmt: skip
    by_group = [x.reshape(*k.shape[:3], -1, k.shape[3]).sum(3) for x in grads]
    return dq, *(jnp.where(is_key[:, :, None, None], x, jnp.nan) for x in by_group), None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_library(options, q, k, v, lengths):
    return library_forward(options, q, k, v, lengths)[0]


run_library.defvjp(library_forward, library_backward)


def library(q, k, v, *, scale, is_causal, key_value_seq_lengths, implementation):
    assert implementation == "cudnn"
    assert q.shape[1] % 8 == 0
    lengths = key_value_seq_lengths
    lengths = jnp.full(len(q), q.shape[1], jnp.int32) if lengths is None else lengths
    return run_library((scale, is_causal), q, k, v, lengths)


@pytest.mark.parametrize("backward", [attention_cudnn.backward, attention_gpu.backward])
@pytest.mark.parametrize(
    "tokens, causal, n_keys",
    [(1, False, 0), (128, True, 0), (73, False, 0), (73, False, 66), (200, True, 0),
     (200, False, 193)],
)  # fmt: skip
def test_rows_of_one_segment(monkeypatch, tokens, causal, n_keys, backward):
    monkeypatch.setattr(jax.nn, "dot_product_attention", library)
    qkv = make_qkv(2, tokens, 4, 2, 8)
    kernel = AttentionKernel(attention_cudnn.forward, backward, causal, True, 0.4, n_keys=n_keys)

    def both(function):
        out, pull = jax.vjp(function, *qkv)
        return [out, *pull(wave_like(out))]

    plain = partial(
        attention, token_mask=None, causal=causal, kernel="xla", scale=0.4, n_keys=n_keys
    )
    found = jax.jit(lambda: both(lambda *a: run_split(kernel, *a, None)))()
    for x, y in zip(found, jax.jit(lambda: both(plain))(), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_backward_runs_no_forward_again(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", library)
    q = jnp.zeros((1, 8, 2, 8))
    options = {"causal": False, "interpret": True, "scale": 1.0}
    run = jax.jit(partial(attention_cudnn.backward, **options))
    log_sum = jnp.zeros((1, 2, 8))
    text = run.lower(q, q, q, None, q, log_sum, q).compile().as_text()
    assert "exponential" in text
    assert " log(" not in text
