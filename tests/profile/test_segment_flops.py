"""FLOPs needed, against counts by hand of a decoder and an encoder."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from dflop_jax.profile.needed import segment_flops, visible_pair_share
from dflop_jax.records import BACKWARD, FORWARD, Edge, MeshShape, SegmentPlan, Shape
from dflop_jax.runtime.layout import device_mesh
from dflop_jax.runtime.segment import EVALUATE, Segment
from models.decoder import DecoderModule
from models.sizes import DecoderSize, VisionSize
from models.vit import VisionModule

WIDTH, MLP, VOCAB, LAYERS = 64, 160, 512, 4
HEADS, KV_HEADS, HEAD = 4, 2, 16
ROWS, TOKENS = 2, 96
DECODER = DecoderModule(
    DecoderSize(WIDTH, LAYERS, HEADS, KV_HEADS, MLP, VOCAB), jnp.dtype("float32")
)
EDGE = Edge("pictures", "text", "visual")

N = ROWS * TOKENS
DENSE = LAYERS * 2 * N * (2 * WIDTH * HEADS * HEAD + 2 * WIDTH * KV_HEADS * HEAD + 3 * WIDTH * MLP)
ATTENTION = LAYERS * 2 * 2 * ROWS * HEADS * HEAD * TOKENS * (TOKENS + 1) / 2
HEAD_FLOPS = 2 * N * WIDTH * VOCAB


def segment(module=DECODER, mesh=(1, 1, 1), microbatches=1, **changes) -> Segment:
    plan = SegmentPlan("text", "text", 0, module.n_layers, "all", True, True)
    whole = Segment(
        plan=plan,
        module=module,
        mesh=device_mesh(MeshShape(*mesh), jax.devices()),
        microbatches=microbatches,
        trainable=frozenset(("entry", "layers", "exit")),
        wants_gradient=frozenset(("visual",)),
        edges=(EDGE,),
    )
    return replace(whole, **changes)


SHAPE = Shape(ROWS, TOKENS)


@pytest.mark.parametrize("kind", [FORWARD, EVALUATE])
def test_forward_needs_every_product_once(kind):
    flops = segment_flops(segment(), SHAPE, kind, with_forward=False)
    assert flops == pytest.approx(DENSE + ATTENTION + HEAD_FLOPS, rel=1e-12)


def test_backward_needs_two_for_each_and_its_own_forward_where_there_is_no_other():
    forward = DENSE + ATTENTION + HEAD_FLOPS
    flops = segment_flops(segment(), SHAPE, BACKWARD, with_forward=False)
    assert flops == pytest.approx(2 * forward, rel=1e-12)
    flops = segment_flops(segment(), SHAPE, BACKWARD, with_forward=True)
    assert flops == pytest.approx(3 * forward, rel=1e-12)


@pytest.mark.parametrize(
    "trainable, brought, dense, attention, head",
    [
        (("exit",), (), 0, 0, 2),  # the norm before the head trains too
        (("layers",), (), 2, 2, 1),
        ((), ("visual",), 1, 2, 1),
        (("exit",), ("visual",), 1, 2, 2),
        (("entry",), (), 1, 2, 1),
    ],
)
def test_frozen_parts_need_no_gradient_of_their_own(trainable, brought, dense, attention, head):
    s = segment(trainable=frozenset(trainable), wants_gradient=frozenset(brought))
    wanted = dense * DENSE + attention * ATTENTION + head * HEAD_FLOPS
    assert segment_flops(s, SHAPE, BACKWARD, with_forward=False) == pytest.approx(wanted)


def test_a_device_needs_its_share():
    one = segment_flops(segment(), SHAPE, BACKWARD, with_forward=True)
    s = segment(mesh=(2, 2, 2), microbatches=4)
    # Data ranks have rows of their own.
    assert segment_flops(s, SHAPE, BACKWARD, with_forward=True) == one * 4 / (2 * 2)


def test_inner_segments_need_their_layers():
    plan = SegmentPlan("text.1", "text", 1, 3, "all", False, False)
    s = segment(plan=plan, wants_gradient=frozenset(("hidden",)), trainable=frozenset(("layers",)))
    flops = segment_flops(s, SHAPE, BACKWARD, with_forward=False)
    assert flops == pytest.approx((DENSE + ATTENTION) * 2 * 2 / LAYERS)


def test_the_share_of_pairs_that_attention_sees():
    encoder = VisionModule(VisionSize(32, 8, 48, 3, 4, 96), 64, jnp.dtype("float32"))
    assert visible_pair_share(encoder, 16) == 1.0
    assert visible_pair_share(DECODER, 1) == 1.0
    assert visible_pair_share(DECODER, 3) == pytest.approx(6 / 9)
    assert visible_pair_share(DECODER, 1000) == pytest.approx(0.5, rel=2e-3)
