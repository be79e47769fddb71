"""Kernels of traced functions by hand, and over devices."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from dflop_jax.profile import traced_parts
from dflop_jax.profile.kernels import Kind, kernels_of, peak_temporary_bytes
from dflop_jax.profile.sharded_trace import trace
from dflop_jax.profile.traced_parts import TraceSpec, hidden_bytes, residual_bytes, trace_kernels
from dflop_jax.records import BACKWARD, FORWARD, Shape
from models.llava import build as build_llava
from models.qwen2_audio import build as build_audio

T, D, F = 6, 8, 12  # tokens, width, hidden width


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def run(function, args, dims, tp):
    return kernels_of(trace(jax.make_jaxpr(function)(*args), dims, tp))


def of_kind(kernels, kind):
    return [k for k in kernels if k.kind == kind]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_an_mlp_by_hand(tp):
    """Split over its hidden width: one reduction of the output, as in Megatron-LM."""

    def mlp(x, up, down):
        return jax.nn.silu(x @ up) @ down

    kernels = run(mlp, (array(T, D), array(D, F), array(F, D)), (None, 1, 0), tp)
    up, down = of_kind(kernels, Kind.MATMUL)
    f = F / tp
    assert (up.rows, up.cols, up.depth, up.flops) == (T, f, D, 2 * T * f * D)
    assert (down.rows, down.cols, down.depth, down.flops) == (T, D, f, 2 * T * f * D)
    assert up.n_bytes == 4 * (T * D + D * f + T * f)
    assert down.n_bytes == 4 * (T * f + f * D + T * D)
    (silu,) = of_kind(kernels, Kind.ELEMENTWISE)  # fused: read once, written once
    assert silu.n_bytes == 4 * 2 * T * f
    reduced = of_kind(kernels, Kind.REDUCE)
    assert [r.n_bytes for r in reduced] == ([] if tp == 1 else [4 * T * D])


def test_terms_of_one_sum_are_reduced_once():
    def function(x, a, b, c):
        return (x @ a + x @ b) + (x @ c).reshape(T, D), x @ a

    args = (array(T, F), *[array(F, D)] * 3)
    reduced = of_kind(run(function, args, (1, 0, 0, 0), 2), Kind.REDUCE)
    assert [r.n_bytes for r in reduced] == [4 * T * D] * 2  # the sum, and the product on its own


def test_a_loop_counts_every_turn_and_shards_its_carry():
    def function(x, w):
        turn = jax.checkpoint(lambda c, row: (c + row[:, None] * w, row @ w))
        return jax.lax.scan(turn, jnp.zeros((D, F)), x)

    kernels = run(function, (array(5, D), array(D, F)), (None, 1), 2)
    (product,) = of_kind(kernels, Kind.MATMUL)
    assert (product.repeats, product.flops) == (5, 2 * D * F / 2)
    in_loop = [k for k in of_kind(kernels, Kind.ELEMENTWISE) if k.repeats == 5]
    assert [k.n_bytes for k in in_loop] == [4 * (D + 3 * D * F / 2)]  # row, w, carry in and out
    assert not of_kind(kernels, Kind.REDUCE)


def test_dead_work_and_pure_layout_cost_nothing():
    def function(x, w):
        _ = x @ w
        return x.T.reshape(-1)

    assert run(function, (array(T, D), array(D, F)), (None, 1), 2) == []
    assert run(lambda x: x, (array(T),), (None,), 1) == []


def test_lookups_in_a_sharded_table_and_their_gradient():
    def function(table, ids):
        return jax.vjp(lambda t: t[ids], table)[1](jnp.ones((T, D)))[0]

    args = array(64, D), array(T, dtype=jnp.int32)
    kernels = run(lambda t, i: t[i], args, (0, None), 2)
    assert [k.n_bytes for k in of_kind(kernels, Kind.LOOKUP)] == [2 * 4 * T * D]
    assert [k.n_bytes for k in of_kind(kernels, Kind.REDUCE)] == [4 * T * D]
    assert len(of_kind(run(function, args, (0, None), 2), Kind.LOOKUP)) == 1


def test_convolutions_count_their_window():
    def function(x, k):
        return jax.lax.conv_general_dilated(
            x, k, (2,), "SAME", dimension_numbers=("NTC", "TIO", "NTC")
        )

    kernels = run(function, (array(2, 10, 3), array(5, 3, 7)), (None, None), 1)
    (conv,) = of_kind(kernels, Kind.MATMUL)
    assert conv.flops == 2 * (2 * 5) * 7 * (5 * 3)


LLAVA, AUDIO = build_llava("nano", "bfloat16"), build_audio("qwen2-audio-nano")


@pytest.mark.parametrize("model, name", [(LLAVA, "vision"), (LLAVA, "llm"), (AUDIO, "audio")])
def test_layer_gathers_and_scatters_tokens_around_products(model, name):
    """Attention and the MLP each. Backward does so with gradients and gathers what both read again;
    if the layer is computed again, it scatters attention's sum, too. What is left to reduce are
    gradients of norms and biases, of which each rank's tokens have a part."""
    module, shape = model.modules[name], Shape(2, 96) if name == "llm" else Shape(3, 16)
    for direction, remat, n in (
        (FORWARD, "none", 4), (BACKWARD, "none", 6), (BACKWARD, "layers", 7)
    ):  # fmt: skip
        for tp in (1, 2):
            kernels = trace_kernels(TraceSpec(module, "layers", shape, tp, (), remat), direction)
            whole = hidden_bytes(module, shape)
            assert [k.n_bytes for k in of_kind(kernels, Kind.GATHER)] == [whole] * n * (tp > 1)
            assert all(k.n_bytes < whole / 8 for k in of_kind(kernels, Kind.REDUCE))


def test_attention_kernels_have_flops_of_a_pair():
    """Two products forward and seven backward; what they compute of pairs a trace does not show."""
    llm, shape = build_llava("nano", attention_kernel="pallas").modules["llm"], Shape(2, 64)
    for direction, kind, products in (
        (FORWARD, Kind.ATTENTION, 2),
        (BACKWARD, Kind.ATTENTION_BACKWARD, 7),
    ):
        for tp in (1, 2):
            kernels = of_kind(trace_kernels(TraceSpec(llm, "layers", shape, tp), direction), kind)
            assert sum(k.flops for k in kernels) == 0
            want = 2 * products * shape.size * 4 * 32 / tp  # heads of 8, filled up to 32
            assert sum(k.pair_flops * k.repeats for k in kernels) == want


def test_peak_temporary_bytes_by_hand():
    def function(x, w):
        a = x @ w  # T x F
        b = jnp.tanh(a)  # over a
        c = b @ w.T  # T x D, beside b
        return c @ w

    region = trace(jax.make_jaxpr(function)(array(T, D), array(D, F)), (None, None), 1)
    assert peak_temporary_bytes(region, lambda v: v.n_bytes) == 4 * (T * F + T * D)
    empty = trace(jax.make_jaxpr(lambda x: x)(array(T)), (None,), 1)
    assert peak_temporary_bytes(empty, lambda v: v.n_bytes) == 0


def test_residual_bytes_follow_the_recompute_policy():
    """Of a layer its input at least, and never what follows from parameters or fields alone."""
    llm, shape = LLAVA.modules["llm"], Shape(1, 96)
    hidden = hidden_bytes(llm, shape)
    specs = {
        r: TraceSpec(llm, "layers", shape, remat=r) for r in ("none", "dots", "layers", "segment")
    }
    none, dots, layers, segment = (residual_bytes(part, 2) for part in specs.values())
    assert layers == hidden < dots < none == segment
    assert residual_bytes(replace(specs["layers"], tp=2), 2) == hidden / 2
    # Tokens and features are there anyway.
    assert residual_bytes(replace(specs["none"], part="entry"), 2) == 0.0
    specs["halved"] = replace(specs["none"], tp=2)
    flops = {
        r: sum(k.flops * k.repeats for k in trace_kernels(part, BACKWARD))
        for r, part in specs.items()
    }
    forward = traced_parts.forward_flops(specs["none"])
    assert flops["none"] == pytest.approx(2 * forward)
    assert flops["halved"] == pytest.approx(forward)
    assert flops["none"] < flops["dots"] < flops["layers"] <= 3 * forward
