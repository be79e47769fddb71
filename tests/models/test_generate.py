"""Decoding with a cache against running the whole row anew, token by token."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fields import fields, forward, full_params

from models.decoder import DecoderModule
from models.sizes import DECODERS

F32 = jnp.dtype("float32")
TIED = DECODERS["nano"]
SIZES = {
    "tied, 2 heads a kv head": TIED,
    "untied, no bias": dataclasses.replace(TIED, tied=False, qkv_bias=False),
    "1 head a kv head": dataclasses.replace(TIED, n_kv_heads=4),
    "4 heads a kv head": dataclasses.replace(TIED, n_kv_heads=1, tied=False),
}


def one_sample_rows(module, items, tokens):
    """Rows of one sample each, visual tokens among its first ones."""
    batch = fields(module, items, tokens)
    batch["segment_ids"] = jnp.ones((items, tokens), jnp.int32)
    batch["positions"] = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), (items, 1))
    return batch


def whole(module, params, batch):
    """Logits at every position, [items, tokens, vocab]."""
    return module.logits(params["exit"], forward(module, params, batch), params["entry"])


def padded(batch, tokens):
    """The rows cut or padded to a length; what pads is another segment with other content."""
    out = {}
    for name, a in batch.items():
        more = max(0, tokens - a.shape[1])
        filler = 7 if name == "tokens" else 0
        pad = ((0, 0), (0, more), *[(0, 0)] * (a.ndim - 2))
        out[name] = jnp.pad(a[:, :tokens], pad, constant_values=filler)
    return out


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("prompt", [1, 5, 8])
def test_logits_equal_those_of_the_whole_row_at_every_position(size, prompt):
    module = DecoderModule(size, F32)
    params = full_params(module)
    batch = one_sample_rows(module, 2, 19)
    batch["is_visual"] = batch["is_visual"] & (jnp.arange(19) < prompt)[None]
    want = np.asarray(jax.jit(partial(whole, module))(params, batch))
    start = padded({k: a[:, :prompt] for k, a in batch.items()}, 8)
    last = jnp.full(2, prompt - 1, jnp.int32)
    logits, cache = jax.jit(module.prefill, static_argnums=3)(params, start, last, 24)
    found = [logits]
    decode = jax.jit(module.decode, donate_argnums=1)
    for t in range(prompt, 19):
        at = jnp.full(2, t, jnp.int32)
        logits, cache = decode(params, cache, batch["tokens"][:, t], at)
        found.append(logits)
    assert decode._cache_size() == 1
    found = np.stack(found, axis=1)
    assert found.dtype == np.float32
    scale = np.abs(want).max()
    np.testing.assert_allclose(found / scale, want[:, prompt - 1 :] / scale, atol=1e-5)


def test_rows_of_different_lengths_do_not_meet():
    module = DecoderModule(TIED, F32)
    params = full_params(module)
    batch = one_sample_rows(module, 3, 12)
    batch["is_visual"] = jnp.zeros_like(batch["is_visual"])
    lengths = [1, 6, 4]
    last = jnp.asarray(lengths, jnp.int32) - 1
    padding = jnp.arange(8)[None] > last[:, None]
    start = padded({k: a[:, :8] for k, a in batch.items()}, 8)
    start["segment_ids"] = jnp.where(padding, 0, 1)
    logits, cache = jax.jit(module.prefill, static_argnums=3)(params, start, last, 12)
    want = np.asarray(jax.jit(partial(whole, module))(params, batch))
    for step in range(4):
        at = last + step
        for row in range(3):
            np.testing.assert_allclose(logits[row], want[row, int(at[row])], atol=2e-4)
        following = batch["tokens"][jnp.arange(3), at + 1]
        logits, cache = jax.jit(module.decode)(params, cache, following, at + 1)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_greedy_tokens_equal_those_of_full_recomputation(size):
    module = DecoderModule(size, F32)
    params = full_params(module, seed=5)
    batch = one_sample_rows(module, 1, 6)
    tokens = list(np.asarray(batch["tokens"][0]))
    logits, cache = module.prefill(params, batch, jnp.asarray([5], jnp.int32), 16)
    found = []
    decode = jax.jit(module.decode)
    for position in range(6, 16):
        found.append(int(logits[0].argmax()))
        at = jnp.asarray([position], jnp.int32)
        logits, cache = decode(params, cache, jnp.asarray(found[-1:], jnp.int32), at)
    run = jax.jit(partial(whole, module))
    full = padded(batch, 16)
    full["segment_ids"] = jnp.ones((1, 16), jnp.int32)
    full["positions"] = jnp.arange(16, dtype=jnp.int32)[None]
    for n in range(10):
        row = jnp.asarray([tokens + found[:n] + [0] * (10 - n)], jnp.int32)
        assert int(run(params, {**full, "tokens": row})[0, 5 + n].argmax()) == found[n]
    assert len(set(found)) > 2  # else any cache would do
