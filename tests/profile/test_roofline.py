"""Predicted profiles: the roofline by hand, what small shapes cost, and what pairs do."""

import dataclasses
import itertools

import jax.numpy as jnp
import pytest

from dflop_jax.hardware import find_hardware
from dflop_jax.profile.collectives import all_gather_s, all_reduce_s, send_s
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.profile.kernels import Efficiency, Kernel, Kind, program_s
from dflop_jax.profile.roofline import POLICIES, Predictor, roofline_profile
from dflop_jax.records import BACKWARD, FORWARD, Edge, LayerTiming, ModelProfile, Recompute, Shape
from dflop_jax.records.files import load, save
from models.decoder import DecoderModule
from models.llava import build
from models.sizes import DECODERS

A100 = find_hardware("a100-80")
# Seconds of attention's gradient over forward's: seven products for two, at a rate of their own.
BACK = 3.5 * Efficiency().attention / Efficiency().attention_back
NANO = build("nano", "bfloat16")
SHAPES = {
    "vision": [Shape(n, 16) for n in (1, 4, 16, 64)],
    "llm": [Shape(i, t) for i, t in ((1, 32), (1, 96), (4, 96), (2, 384))],
}


def test_each_kind_of_kernel_by_hand():
    e, n = Efficiency(), 4096
    product = Kernel(Kind.MATMUL, 2.0 * n**3, 6.0 * n**2, n, n, n, "bfloat16")
    peak_s = 2 * n**3 / 312e12
    reached_s = peak_s / (n / (n + e.half_dim)) ** 3
    # Without sizes, as attention that skips has none, its rate holds at any size.
    skipping = Kernel(Kind.ATTENTION, 2.0 * n**3, 0.0, dtype="bfloat16")
    pieces = dataclasses.replace(skipping, pair_flops=2.0 * n**2)
    for kernel, want_s in (
        (product, reached_s / e.matmul),
        (dataclasses.replace(product, dtype="float32"), 2 * reached_s / e.matmul),
        (dataclasses.replace(product, kind=Kind.ATTENTION), reached_s / e.attention),
        (dataclasses.replace(product, kind=Kind.ATTENTION_BACKWARD), reached_s / e.attention_back),
        (skipping, peak_s / e.attention),
        (pieces, peak_s / e.attention * (1 + e.attention_pairs / n)),
        (Kernel(Kind.ELEMENTWISE, 0, 1e9), 1e9 / 2039e9 / e.bandwidth),
        (Kernel(Kind.LOOKUP, 0, 1e9), 1e9 / 2039e9 / e.lookup),
    ):
        twice = dataclasses.replace(kernel, repeats=2)
        assert program_s([twice], 1, A100) == pytest.approx(2 * (want_s + e.launch_s))
    for kernel, want_s in (
        (Kernel(Kind.GATHER, 0, 1e9, group=8, stride=2), all_gather_s(1e9, 8, A100, stride=2)),
        (Kernel(Kind.REDUCE, 0, 1e9), all_reduce_s(1e9, 4, A100)),
        (Kernel(Kind.SEND, 0, 1e9, group=2), send_s(1e9, A100)),
    ):
        assert program_s([kernel], 4, A100) == pytest.approx(want_s)
    assert program_s([], 1, A100) == 0.0


@pytest.mark.parametrize("tokens, forward_ms, both_ms", [(8192, 1.21, 3.70), (32768, 12.1, 47.1)])
def test_a_librarys_attention_costs_what_cudnns_took(tokens, forward_ms, both_ms):
    """On the H100 of docs/gpus.md: 28 heads of 128, causal."""
    forward_s, backward_s = (
        program_s([Kernel(kind, n * tokens**2 / 2, 0.0, dtype="bfloat16", pair_flops=n * tokens,
                          library=True)], 1, find_hardware("h100"))
        for kind, n in (
            (Kind.ATTENTION, 4.0 * 28 * 128), (Kind.ATTENTION_BACKWARD, 10.0 * 28 * 128)
        )
    )  # fmt: skip
    assert 1e3 * forward_s == pytest.approx(forward_ms, rel=0.1)
    assert 1e3 * (forward_s + backward_s) == pytest.approx(both_ms, rel=0.1)


@pytest.mark.slow
def test_a_predicted_profile_is_a_profile(tmp_path):
    """The same records as measuring gives: saved, loaded, fitted and planned with."""
    profile = roofline_profile(NANO, A100, SHAPES, (1, 2), n_devices=4)
    degrees = {(t.module, t.model) for t in profile.timings}
    assert degrees == set(itertools.product(("vision", "llm"), (1, 2)))
    model = CostModel(profile)
    for t in profile.timings:
        assert t.layer_backward_s > t.layer_forward_s > 0 < t.ends_forward_s
        none, dots, named, layers = (t.recompute[r] for r in ("none", "dots", "named", "layers"))
        assert none.layer_bytes > dots.layer_bytes > layers.layer_bytes
        assert layers.layer_bytes == pytest.approx(t.hidden_bytes / t.model)  # split over ranks
        assert named.layer_bytes >= layers.layer_bytes
        assert none.layer_s < dots.layer_s < layers.layer_s
        # The A100's kernel skips; a tile's pairs are in its layers.
        assert len(t.content_forward_s) == len(t.content_backward_s) == (t.module == "llm")
        got = model.predict(t.module, t.model, t.shape.rows, t.shape.tokens)["layer_backward"]
        assert got == pytest.approx(t.layer_backward_s, rel=0.1)
    assert profile.edges == (Edge("vision", "llm", "visual"),)
    assert (profile.tied, profile.piece_tokens) == (("llm",), {"vision": 16})
    assert all(0 < share < 1 for share in profile.entry_share.values())
    save(profile, tmp_path / "p.json")
    assert load(ModelProfile, tmp_path / "p.json") == profile
    few = {m: shapes[2:3] for m, shapes in SHAPES.items()}
    one, again = (roofline_profile(NANO, A100, few, d, n_devices=4) for d in ((1, 2), (2, 1)))
    assert again == one
    other = roofline_profile(NANO, find_hardware("h100"), few, (1,), n_devices=4)
    assert other.key != profile.key
    assert other.priced_by == "the data sheet of h100"


def test_unusable_degrees_are_refused():
    def predict(degrees, hardware=A100):
        return roofline_profile(NANO, hardware, SHAPES, degrees, n_devices=4)

    with pytest.raises(ValueError, match=r"none of .* \[3\] divides the sizes of 'vision'"):
        predict(degrees=(3,))
    single = dataclasses.replace(A100, devices_per_node=1)
    with pytest.raises(ValueError, match="fits into a node of 1; add 1"):
        predict(degrees=(2,), hardware=single)


@pytest.mark.slow
def test_attention_that_skips_costs_by_pairs():
    """Seconds of a pair are its FLOPs; a layer's seconds no longer grow with the square."""
    llm = NANO.modules["llm"]
    flops = 2.0 * llm.size.n_heads * llm.size.head_dim  # causal: half

    def predicted(module, shape, tp=1):
        predictor = Predictor(module, ("visual",), tp, A100)
        return predictor.timings([shape], one_piece_rows=False)[0]

    by_rows, by_pairs = (
        [predicted(m, Shape(n, t)) for n, t in ((16, 128), (1, 2048), (4, 2048))]
        for m in (llm, llm.on_chip("sm_80"))
    )
    want = flops / (312e12 * Efficiency().attention)
    for t, like in zip(by_pairs, by_rows, strict=True):
        assert t.content_forward_s["pair"] == pytest.approx(want)
        assert t.content_backward_s["pair"] == pytest.approx(BACK * want)
        assert like.content_forward_s == {}
        assert t.ends_forward_s == like.ends_forward_s
        if t.shape.tokens > 128:
            assert t.layer_forward_s < like.layer_forward_s
            assert t.layer_backward_s < like.layer_backward_s
            assert t.recompute["none"].temp_bytes < like.recompute["none"].temp_bytes
    short, one, four = by_pairs
    assert one.layer_forward_s == pytest.approx(short.layer_forward_s, rel=0.01)  # as many tokens
    assert one.layer_forward_s < four.layer_forward_s <= 4 * one.layer_forward_s
    halved = predicted(llm.on_chip("sm_80"), Shape(1, 256), 2)
    assert halved.content_forward_s["pair"] == pytest.approx(want / 2)


def test_policy_costs_follow_from_three_traced_shapes():
    """The second is none of the three that are traced."""
    predictor = Predictor(NANO.modules["llm"], ("visual",), 1, A100)
    shapes = [Shape(1, 32), Shape(2, 96), Shape(4, 96), Shape(2, 384)]
    got, want = (
        predictor.policy_costs(many)[shapes[1]]["layers"] for many in (shapes, shapes[1:2])
    )
    assert got.layer_bytes == pytest.approx(want.layer_bytes)
    assert got.layer_s == pytest.approx(want.layer_s, rel=0.1)


def test_edge_fields_get_a_gradient():
    """The entry's backward adds up the features' gradients only where an edge brings them."""
    llm, shape = NANO.modules["llm"], Shape(2, 96)
    placed, own = (Predictor(llm, names, 1, A100) for names in (("visual",), ()))
    assert placed.part_s("entry", FORWARD, shape) == own.part_s("entry", FORWARD, shape)
    assert placed.part_s("entry", BACKWARD, shape) > own.part_s("entry", BACKWARD, shape)


DEEP = DecoderModule(dataclasses.replace(DECODERS["nano"], n_layers=12, tied=False), jnp.float32)


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.4])
def test_policy_residuals_scale_with_compiled_residuals(factor):
    """Beside the input of a layer, which all keep; where temporaries tell, no less than traced."""
    tower = build("nano").modules["vision"]
    for module, shape in ((tower, Shape(2, tower.size.tokens_in_tower)), (DEEP, Shape(2, 128))):
        predictor = Predictor(module, (), 1, find_hardware("h100"), 4)
        traced = {r: c.layer_bytes for r, c in predictor.policy_costs([shape])[shape].items()}
        least, most = traced["layers"], traced["none"]
        compiled = Recompute(layer_bytes=least + factor * (most - least))
        timing = LayerTiming("m", 1, shape, 1.0, 2.0, 0.1, 0.1, 8.0, recompute={"none": compiled})
        (beside,) = predictor.add_policies([timing])
        got = {r: beside.recompute[r].layer_bytes for r in POLICIES}
        more = max(factor, 1.0) if module is DEEP else factor
        assert got["layers"] == least < most
        for r in POLICIES:
            assert got[r] == pytest.approx(least + more * (traced[r] - least))
