"""What forward keeps for backward: enough for the gradient, nothing that backward has anyway."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from dflop_jax.aot.hlo_cost import program_cost
from dflop_jax.aot.hlo_text import parse_hlo
from dflop_jax.profile.needed import segment_flops, visible_pair_share
from dflop_jax.profile.shallow import shallow_segment
from dflop_jax.records import BACKWARD, FORWARD, Edge, MeshShape, Remat, SegmentPlan, Shape
from dflop_jax.runtime import segment, segment_functions
from dflop_jax.runtime.layout import device_mesh
from dflop_jax.runtime.lowering import Lowering, compiler_options
from dflop_jax.runtime.residuals import REMAT, SplitVjp
from dflop_jax.runtime.segment import Segment, device_bytes
from models.decoder import DecoderModule
from models.encoder import EncoderBlock, EncoderForm
from models.layers import apply, exact_gelu, init_values, tanh_gelu
from models.sizes import DECODERS, VisionSize
from models.vit import VisionModule

from .test_gradients import NANO

ROWS, TOKENS, WIDTH, WIDE = 2, 3, 4, 8
HALF, F32 = jnp.bfloat16, jnp.dtype("float32")


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


@pytest.mark.parametrize("activation", [exact_gelu, tanh_gelu, jax.nn.gelu, jax.nn.silu])
def test_activations_are_computed_again(activation):
    """Of an MLP its input and the first product are kept, whatever primitives a jax has."""

    def mlp(free, h, placed, given):
        return activation(h @ free["up"]) @ free["down"]

    free = {"up": jnp.ones((WIDTH, WIDE)), "down": jnp.ones((WIDE, WIDTH))}
    h = jnp.ones((ROWS, TOKENS, WIDTH))
    recorded = SplitVjp(REMAT["none"], mlp, free, h, {}, {}, wants_hidden=True)
    kept = jax.eval_shape(recorded.forward, free, h, {}, {})[1]
    assert sorted(k.shape for k in kept) == sorted([h.shape, UP])


def test_a_sum_is_saved_in_place_of_the_product_in_it():
    rng = np.random.default_rng(0)
    h, up, bias = (rng.standard_normal(n).astype(np.float32) for n in ((3, 4), (4, 5), 5))

    def run(named, trained, h, edge_inputs, constants):
        y = h @ trained["up"] + trained["bias"][None]
        return jnp.sin(checkpoint_name(y, "sum") if named else y)

    for named, want in ((True, h @ up + bias), (False, h @ up)):
        args = {"up": up, "bias": bias}, h, {}, {}
        split = SplitVjp(REMAT["none"], partial(run, named), *args, wants_hidden=True)
        _, residuals = split.forward(*args)
        (saved,) = (x for x in residuals if x.shape == want.shape)
        np.testing.assert_allclose(saved, want, rtol=1e-5)


def test_encoders_save_what_attention_reads():
    """Not the products of queries, keys and values, to which a bias is added."""
    seen = []

    def attend(q, k, v, ids, *, causal, n_keys):
        if not isinstance(q, jax.core.Tracer):
            seen.extend((q, k, v))
        return jnp.sin(q) * jnp.sin(k) * jnp.sin(v)

    block = EncoderBlock(VisionSize(32, 8, 64, 2, 4, 160), EncoderForm(tanh_gelu), F32, attend)
    h = jax.random.normal(jax.random.key(1), (2, 16, 64), F32)
    params = init_values(block, jax.random.key(0), h)
    params = jax.tree.map(lambda a: a + 0.5, params)
    args = params, h, {}, {}
    split = SplitVjp(REMAT["none"], lambda p, h, *_: apply(block, p, h), *args, wants_hidden=True)
    seen.clear()
    apply(block, params, h)
    kept = [x for x in split.forward(*args)[1] if x.shape == seen[0].shape]
    for x in seen:
        assert any(np.allclose(y, x, rtol=1e-4, atol=1e-4) for y in kept)


# ---- recompute policies of segments ----

VIT = VisionModule(VisionSize(32, 8, 64, 2, 4, 160), 64, jax.numpy.dtype("float32"))


def encoder(remat: Remat) -> Segment:
    """Another module reads it."""
    plan = SegmentPlan("vision", "vision", 0, VIT.n_layers, "all", True, True, remat)
    mesh = device_mesh(MeshShape(), jax.devices())
    parts = frozenset(("entry", "layers", "exit"))
    return Segment(plan, VIT, mesh, 1, parts, edges=(Edge("vision", "llm", "visual"),))


def inner_layers(remat: Remat) -> Segment:
    """Layers of a decoder between two others."""
    module = NANO.modules["llm"]
    plan = SegmentPlan("llm1", "llm", 1, 3, "all", False, False, remat)
    mesh = device_mesh(MeshShape(), jax.devices())
    return Segment(plan, module, mesh, 1, frozenset(("layers",)), frozenset(("hidden",)))


def test_each_policy_keeps_what_it_says():
    tokens, shape = 96, Shape(1, 96)
    size = inner_layers("none").module.size
    attended = size.n_heads * size.head_dim
    projected = attended + 2 * size.n_kv_heads * size.head_dim
    values = {  # of each token in each of two layers
        "segment": 0,
        "layers": size.width,
        "named": size.width + attended,
        "dots": size.width + projected + size.width + 2 * size.mlp,
    }
    for remat, n in values.items():
        residuals = Lowering(inner_layers(remat)).residual_structs(shape)
        assert device_bytes(residuals) == 2 * tokens * n * 4
    # Scores of a token with all of its row, and sums of the two norms and of each head's softmax.
    more = attended + size.n_heads * tokens + 2 + 2 * size.n_heads
    residuals = Lowering(inner_layers("none")).residual_structs(shape)
    assert device_bytes(residuals) == 2 * tokens * (values["dots"] + more) * 4


@pytest.mark.parametrize(
    "make, shape, remat, least, most",
    [
        (encoder, Shape(4, 16), "none", 0.99, 1.03),
        (inner_layers, Shape(24, 4), "none", 0.99, 1.03),
        (encoder, Shape(4, 16), "segment", 1.30, 1.37),
    ],
)
def test_forward_and_backward_compute_what_they_need(make, shape, remat, least, most):
    s = make(remat)
    executed = needed = 0.0
    for kind in (FORWARD, BACKWARD):
        executed += executed_flops(s, shape, kind)
        needed += segment_flops(s, shape, kind, with_forward=False)
    assert least <= executed / needed <= most


def executed_flops(s: Segment, shape: Shape, kind: str) -> float:
    """FLOPs of a segment's compiled program."""
    text = Lowering(s).lower(shape, kind).compile().as_text()
    return program_cost(parse_hlo(text), visible_pair_share(s.module, shape.tokens)).flops


def ends_in_a_loss(remat: Remat) -> Segment:
    """The last layers of a decoder, whose backward task is also its forward task."""
    module = NANO.modules["llm"]
    n = module.n_layers
    plan = SegmentPlan("llm1", "llm", n - 2, n, "all", False, True, remat)
    mesh = device_mesh(MeshShape(), jax.devices())
    parts = frozenset(("layers", "exit"))
    return Segment(plan, module, mesh, 1, parts, frozenset(("hidden",)), shares_entry=True)


@pytest.mark.slow(first=1)
@pytest.mark.parametrize("remat", ["none", "layers"])
def test_unrolled_layers_keep_and_compute_what_a_loop_does(remat):
    """Nothing that is to be computed again is merged with what forward computed."""
    inner, last, shape = inner_layers(remat), ends_in_a_loss(remat), Shape(1, 32)
    kept = Lowering(inner).residual_bytes(shape)
    flops = [executed_flops(s, shape, BACKWARD) for s in (inner, last)]
    inner, last = (replace(s, plan=replace(s.plan, unrolled=True)) for s in (inner, last))
    structs = Lowering(inner).residual_structs(shape)
    assert inner.unrolls_layers
    assert last.unrolls_layers
    assert device_bytes(structs) == kept
    assert len(structs["slots"]["layers 0"]) == 2  # of each layer its own
    for s, want in zip((inner, last), flops, strict=True):
        assert executed_flops(s, shape, BACKWARD) == want


def test_forward_in_a_loop_does_not_fuse_products_with_stacks(monkeypatch):
    """On GPUs; elsewhere, in backward alone, and where nothing loops, the compiler may."""
    one = inner_layers("none")
    assert compiler_options(one, FORWARD) == {}
    monkeypatch.setattr(Segment, "chip", "sm_90")

    def fuses(segment, direction):
        return compiler_options(segment, direction).get("xla_gpu_enable_dynamic_slice_fusion", True)

    assert fuses(one, FORWARD)
    assert not fuses(replace(one, microbatches=2), FORWARD)
    assert fuses(replace(one, microbatches=2), BACKWARD)
    assert not fuses(replace(ends_in_a_loss("none"), microbatches=2), BACKWARD)
    monkeypatch.setattr(segment, "max_unrolled_layers", lambda chip: 1)
    assert not fuses(inner_layers("none"), FORWARD)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_dynamic_slice_fusion=false --of_mine=1")
    assert fuses(inner_layers("none"), FORWARD)  # it is the user's to say


def test_forward_and_backward_share_a_layers_trace(monkeypatch):
    """Both programs at a shape trace each function of the segment once; another shape again."""
    traced = []
    monkeypatch.setattr(
        segment_functions, "SplitVjp", lambda *a, **k: traced.append(a) or SplitVjp(*a, **k)
    )
    lowering = Lowering(shallow_segment(NANO, "vision", 2, jax.devices()[:1], MeshShape()))
    counts, small, large = [], Shape(1, 16), Shape(2, 16)
    for shape, kind in ((small, FORWARD), (small, BACKWARD), (large, BACKWARD)):
        lowering.lower(shape, kind)
        counts.append(len(traced))
    assert counts[0] == counts[1] > 1
    assert counts[2] == 2 * counts[0]
