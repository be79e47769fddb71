"""Decoding by what layers keep against running the whole row anew, token by token: layers of one
kind, and windows among them."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_fields import fields, full_params

from dflop_jax.generate.decoding import decode, grow_cache, prefill
from dflop_jax.generate.row import run_layers
from models.decoder import DecoderModule
from models.gemma_decoder import GemmaModule
from models.gemma_sizes import GEMMA3, GLOBAL, SLIDING
from models.qwen3_5_decoder import HybridModule
from models.qwen3_5_sizes import QWEN3_5
from models.sizes import DECODERS

F32 = jnp.dtype("float32")
TIED = DECODERS["nano"]
SIZES = {
    "tied, 2 heads a kv head": TIED,
    "untied, no bias, 4 heads a kv head": dataclasses.replace(
        TIED, n_kv_heads=1, tied=False, qkv_bias=False
    ),
}
WINDOW = 4
HYBRID = dataclasses.replace(QWEN3_5["qwen3.5-nano"].decoder, mrope_sections=())
GEMMA = GEMMA3["gemma3-nano"].decoder
HEADS = dataclasses.replace(GEMMA.sliding_heads, window=WINDOW, bidirectional_images=False)
GEMMA = dataclasses.replace(GEMMA, sliding_heads=HEADS)


def plain(size):
    module = DecoderModule(size, F32)
    return module, full_params(module)


def one_sample_rows(module, items, tokens):
    """Rows of one sample each, visual tokens among its first ones."""
    size = dataclasses.replace(TIED, width=module.size.width, vocab=module.size.vocab)
    batch = fields(DecoderModule(size, F32), items, tokens)
    batch["segment_ids"] = jnp.ones((items, tokens), jnp.int32)
    batch["positions"] = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), (items, 1))
    return batch


def whole(module, params, batch):
    """Logits at every position, [items, tokens, vocab]."""
    x = module.entry(params["entry"], batch)
    x, _ = run_layers(module, params, x, batch, 0, module.n_layers)
    return module.logits(params["exit"], x, params["entry"])


def started(module, params, batch, last, slots):
    run = jax.jit(partial(prefill, module, slots=slots, inlets={}))
    return run(params, batch=batch, last_B=jnp.asarray(last, jnp.int32))


def padded(batch, tokens):
    """The rows cut or padded to a length; what pads is another segment with other content."""
    out = {}
    for name, a in batch.items():
        more = max(0, tokens - a.shape[1])
        filler = 7 if name == "tokens" else 0
        pad = ((0, 0), (0, more), *[(0, 0)] * (a.ndim - 2))
        out[name] = jnp.pad(a[:, :tokens], pad, constant_values=filler)
    return out


KINDS = {"l": "linear", "f": "full", "w": SLIDING, "g": GLOBAL}


def of_kinds(pattern):
    """(a decoder with layers of these kinds: gated delta nets and gated attention, or windows and
    attention to all; its parameters)."""
    kinds = tuple(KINDS[c] for c in pattern)
    if {"l", "f"} & set(pattern):
        module = HybridModule(dataclasses.replace(HYBRID, n_layers=len(kinds), kinds=kinds), F32)
    else:
        module = GemmaModule(dataclasses.replace(GEMMA, kinds=kinds), F32)
    rng, params = np.random.default_rng(3), {}
    for part in module.inputs:
        n = kinds.count(part) if part in kinds else 0
        one = jax.eval_shape(partial(module.init, part), jax.random.key(0))
        lead = (n,) if n else ()
        params[part] = jax.tree.map(
            lambda a, lead=lead: jnp.asarray(0.2 * rng.normal(size=lead + a.shape), jnp.float32),
            one,
        )
    return module, params


CASES = {
    **{p: partial(of_kinds, p) for p in ("l", "llfl", "w")},
    **{name: partial(plain, size) for name, size in SIZES.items()},
    "wwgwwg": partial(of_kinds, "wwgwwg"),
}


@pytest.mark.slow(first=3)
@pytest.mark.parametrize("made", CASES.values(), ids=CASES)
@pytest.mark.parametrize("prompt", [1, 5, 8])
def test_logits_equal_those_of_the_whole_row_at_every_position(made, prompt):
    module, params = made()
    batch = one_sample_rows(module, 2, 19)
    batch["is_visual"] = batch["is_visual"] & (jnp.arange(19) < prompt)[None]
    want = np.asarray(jax.jit(partial(whole, module))(params, batch))
    start = padded({k: a[:, :prompt] for k, a in batch.items()}, 8)
    logits, cache = started(module, params, start, [prompt - 1] * 2, 10)
    found, step = [logits], jax.jit(partial(decode, module), donate_argnums=1)
    for t in range(prompt, 19):
        if t == 10:  # there is no room for more
            cache = grow_cache(module, cache, 24)
        at = jnp.full(2, t, jnp.int32)
        logits, cache = step(params, cache, batch["tokens"][:, t], at)
        found.append(logits)
    assert step._cache_size() <= 2
    found = np.stack(found, axis=1)
    assert found.dtype == np.float32
    scale = np.abs(want).max()
    np.testing.assert_allclose(found / scale, want[:, prompt - 1 :] / scale, atol=1e-5)


def test_a_window_keeps_no_more_than_its_tokens():
    module, params = of_kinds("wgw")
    batch = one_sample_rows(module, 2, 8)
    _, cache = started(module, params, batch, [7, 3], 64)
    slots = {kind: kept.keys_LBSKH.shape[:3] for kind, kept in cache.by_kind.items()}
    assert slots == {SLIDING: (2, 2, WINDOW), GLOBAL: (1, 2, 64)}
    slots = {k: a.keys_LBSKH.shape[2] for k, a in grow_cache(module, cache, 99).by_kind.items()}
    assert slots == {SLIDING: WINDOW, GLOBAL: 99}


@pytest.mark.slow(first=1)
@pytest.mark.parametrize(
    "made", [partial(plain, TIED), partial(of_kinds, "wgw"), partial(of_kinds, "lfl")]
)
def test_rows_of_different_lengths_do_not_meet(made):
    module, params = made()
    batch = one_sample_rows(module, 3, 12)
    batch["is_visual"] = jnp.zeros_like(batch["is_visual"])
    last = jnp.asarray([0, 5, 3], jnp.int32)
    padding = jnp.arange(8)[None] > last[:, None]
    start = padded({k: a[:, :8] for k, a in batch.items()}, 8)
    start["segment_ids"] = jnp.where(padding, 0, 1)
    logits, cache = started(module, params, start, last, 12)
    want = np.asarray(jax.jit(partial(whole, module))(params, batch))
    step = jax.jit(partial(decode, module), donate_argnums=1)
    for n in range(4):
        at = last + n
        for row in range(3):
            np.testing.assert_allclose(logits[row], want[row, int(at[row])], atol=2e-4)
        following = batch["tokens"][jnp.arange(3), at + 1]
        logits, cache = step(params, cache, following, at + 1)
