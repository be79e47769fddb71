"""What forward keeps for backward: enough for the gradient, nothing that backward has anyway."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from dflop_jax.runtime.residuals import REMAT, SplitVjp
from models.decoder import DecoderModule
from models.sizes import DECODERS

ROWS, TOKENS, WIDTH, WIDE = 2, 3, 4, 8
HALF = jnp.bfloat16


def piece(free, h, placed, given):
    """A layer in bfloat16 with a float32 norm, a mask, and a product of activations."""
    frozen, segment_ids = given
    table = jnp.cos(segment_ids.astype(jnp.float32))[:, :, None]  # of fields alone
    x = h.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True)) * table
    up = jnp.einsum("BTD,DW->BTW", x.astype(HALF), free["up"].astype(HALF))
    same = segment_ids[:, :, None] == segment_ids[:, None]
    scores = jnp.einsum("BTW,BSW->BTS", up, up, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(same, scores, -1e9), axis=-1).astype(HALF)
    seen = checkpoint_name(jnp.einsum("BTS,BSW->BTW", weights, up), "attention")
    out = jnp.einsum("BTW,WD->BTD", jax.nn.silu(seen), frozen["down"].astype(HALF))
    return h + out + placed["brought"]


def arrays():
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    hidden = (ROWS, TOKENS, WIDTH)
    segment_ids = jnp.asarray([[1, 1, 2], [1, 2, 2]], jnp.int32)
    return (
        {"up": normal(WIDTH, WIDE)},
        normal(*hidden, dtype=HALF),
        {"brought": normal(*hidden, dtype=HALF)},
        ({"down": normal(WIDE, WIDTH)}, segment_ids),
    )


NORM, UP, SCORES = (ROWS, TOKENS, 1), (ROWS, TOKENS, WIDE), (ROWS, TOKENS, TOKENS)
KEPT = {  # besides the hidden states
    "none": {(ROWS, TOKENS), UP, SCORES, NORM},
    "dots": {UP},
    "named": {UP},
    "layers": set(),
}


def test_a_kernel_makes_nothing_else_dear():
    """Of a layer whose attention is a GPU's kernel no weights are kept, nor what is of fields."""
    module = DecoderModule(DECODERS["nano"], HALF).on_chip("sm_90")
    fields = {n: module.field_spec(n, 1, 128) for n in module.inputs["layers"]}
    hidden = jax.ShapeDtypeStruct((1, 128, module.size.width), HALF)
    params = jax.eval_shape(lambda: module.init("layers", jax.random.key(0)))

    def layer(params, h, _, fields):
        return module.layer(params, h, fields)

    args = (params, hidden, {}, fields)
    for remat in KEPT:
        recorded = SplitVjp(REMAT[remat], layer, *args, wants_hidden=True)
        kept = jax.eval_shape(recorded.forward, *args)[1]
        assert all(128 in k.shape and jnp.issubdtype(k.dtype, jnp.floating) for k in kept)


@pytest.mark.parametrize("remat", KEPT)
def test_backward_needs_what_is_kept_and_what_is_at_hand(remat):
    free, h, placed, given = arrays()
    want_out, vjp = jax.vjp(lambda free, h, placed: piece(free, h, placed, given), free, h, placed)
    recorded = SplitVjp(REMAT[remat], piece, free, h, placed, given, wants_hidden=True)
    out, kept = jax.jit(recorded.forward)(free, h, placed, given)
    np.testing.assert_array_equal(out, want_out)
    got = jax.jit(recorded.backward)(kept, free, placed, given, out)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(vjp(out)), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=0.02, atol=0.02)
    assert h.shape in {k.shape for k in kept}
    assert {k.shape for k in kept} - {h.shape} <= KEPT[remat]
    assert sum(k.shape == h.shape for k in kept) == 1  # not in float32 beside it
    assert not [k for k in kept if k.shape in ((WIDTH, WIDE), (WIDE, WIDTH))]
    assert not [k for k in kept if jnp.issubdtype(k.dtype, jnp.integer) or k.dtype == bool]


def test_without_a_gradient_nothing_is_kept():
    _, h, _, given = arrays()
    double = SplitVjp(
        REMAT["none"], lambda free, h, placed, given: 2 * h, {}, h, {}, given, wants_hidden=False
    )
    out, kept = double.forward({}, h, {}, given)
    assert not kept
    assert not double.has_gradient
    np.testing.assert_array_equal(out, 2 * h)
    assert double.backward([], {}, {}, given, out) == ({}, None, {})
