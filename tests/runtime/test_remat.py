"""Recompute policies save and recompute what they promise."""

import jax
import pytest

from dflop_jax.aot.hlo_cost import program_cost
from dflop_jax.aot.hlo_text import parse_hlo
from dflop_jax.profile.needed import segment_flops, visible_pair_share
from dflop_jax.records import BACKWARD, FORWARD, Edge, MeshShape, Remat, SegmentPlan, Shape
from dflop_jax.runtime import segment
from dflop_jax.runtime.layout import device_mesh
from dflop_jax.runtime.lowering import Lowering
from dflop_jax.runtime.segment import Segment, device_bytes
from models.sizes import VisionSize
from models.vit import VisionModule

from .test_gradients import NANO

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
def test_unrolled_layers_keep_and_compute_what_a_loop_does(remat, monkeypatch):
    """Nothing that is to be computed again is merged with what forward computed."""
    inner, last, shape = inner_layers(remat), ends_in_a_loss(remat), Shape(1, 32)
    kept = Lowering(inner).residual_bytes(shape)
    flops = [executed_flops(s, shape, BACKWARD) for s in (inner, last)]
    monkeypatch.setattr(segment, "max_unrolled_layers", lambda chip: 2)
    inner, last = inner_layers(remat), ends_in_a_loss(remat)
    structs = Lowering(inner).residual_structs(shape)
    assert inner.unrolls_layers
    assert last.unrolls_layers
    assert device_bytes(structs) == kept
    assert len(structs["slots"]["layers 0"]) == 2  # of each layer its own
    for s, want in zip((inner, last), flops, strict=True):
        assert executed_flops(s, shape, BACKWARD) == want
