"""The decoder against plain numpy in float64, and its invariants."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fields import fields, forward, full_params, outputs
from test_attention import oracle as attention_oracle

from models.decoder import DecoderModule
from models.loss import cross_entropy
from models.sizes import DECODERS

QWEN = DECODERS["nano"]
LLAMA = dataclasses.replace(QWEN, qkv_bias=False, tied=False, norm_eps=1e-5, rope_theta=5e5)
F32 = jnp.dtype("float32")


def to_f64(tree):
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


def numpy_norm(p, x, eps):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * p["scale"]


def numpy_rotate(x, positions, theta):
    """Each pair (i, i + half) as a complex number times exp(i * position * frequency)."""
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    angle = positions[..., None] * theta ** (-2.0 * np.arange(half) / x.shape[-1])
    turned = pairs * np.exp(1j * angle)[:, :, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def numpy_layer(size, p, x, positions, segments):
    h = numpy_norm(p["attn_norm"], x, size.norm_eps)
    q, k, v = (
        np.einsum("btd,dnh->btnh", h, p[name]["kernel"]) + p[name].get("bias", 0.0)
        for name in ("query", "key", "value")
    )
    q, k = (numpy_rotate(a, positions, size.rope_theta) for a in (q, k))
    h = attention_oracle(q, k, v, segments, causal=True)
    x = x + np.einsum("btnh,nhd->btd", h, p["out"]["kernel"])
    h = numpy_norm(p["mlp_norm"], x, size.norm_eps)
    gate = h @ p["gate"]["kernel"]
    h = gate / (1 + np.exp(-gate)) * (h @ p["up"]["kernel"])
    return x + h @ p["down"]["kernel"]


def numpy_forward(module, params, batch):
    """(logits, sum of weighted nll, sum of weighted hits) of entry, every layer and exit."""
    p, b, size = to_f64(params), {n: np.asarray(a) for n, a in batch.items()}, module.size
    table = p["entry"]["embedding"]
    x = table[b["tokens"]]
    x[b["is_visual"]] = b["visual"][b["is_visual"]]
    for i in range(module.n_layers):
        layer = jax.tree.map(lambda a, i=i: a[i], p["layers"])
        x = numpy_layer(size, layer, x, b["positions"], b["segment_ids"])
    x = numpy_norm(p["exit"]["norm"], x, size.norm_eps)
    logits = x @ (table if size.tied else p["exit"]["head"]).T
    peak = logits.max(axis=-1, keepdims=True)
    logp = logits - peak - np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True))
    nll = -np.take_along_axis(logp, b["targets"][..., None], axis=-1)[..., 0]
    hits = logits.argmax(axis=-1) == b["targets"]
    return logits, (b["weights"] * nll).sum(), (b["weights"] * hits).sum()


@pytest.mark.parametrize("size", [QWEN, LLAMA], ids=["qwen", "llama"])
@pytest.mark.parametrize("items, tokens", [(0, 4), (1, 1), (2, 11)])
def test_matches_numpy(size, items, tokens):
    module = DecoderModule(size, F32)
    params = full_params(module)
    batch = fields(module, items, tokens)
    logits, loss_sum, correct = numpy_forward(module, params, batch)
    # Half of the targets are what the model predicts, so that `correct` is not 0.
    guess = logits.argmax(axis=-1).astype(np.int32)
    batch["targets"] = batch["targets"].at[:, ::2].set(guess[:, ::2])
    logits, loss_sum, correct = numpy_forward(module, params, batch)

    @jax.jit
    def run(params, batch):
        logits = module.logits(params["exit"], forward(module, params, batch), params["entry"])
        return logits, outputs(module, params, batch)

    found, out = run(params, batch)
    assert found.dtype == jnp.float32
    scale = np.abs(logits).max(initial=1.0)
    np.testing.assert_allclose(found / scale, logits / scale, atol=1e-5)
    np.testing.assert_allclose(out["loss_sum"], loss_sum, rtol=1e-5)
    assert out["correct"] == correct
    assert correct > 0 or tokens < 11


def test_unsupervised_targets_may_lie_outside_of_the_vocabulary():
    x, table = jnp.ones((2, 3)), jnp.ones((4, 3))
    targets, weights = jnp.asarray([-100, 1], jnp.int32), jnp.asarray([0.0, 1.0])
    out = cross_entropy(x, table, targets, weights, logits_elements=100)
    np.testing.assert_allclose(out["loss_sum"], np.log(4), rtol=1e-6)
