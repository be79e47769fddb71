"""The cost model gives back coefficients that made its timings, and a hand formula's seconds."""

import dataclasses

import numpy as np
import pytest

from dflop_jax.hardware import find_hardware
from dflop_jax.plan.memory import peak_bytes
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import (
    BACKWARD,
    FORWARD,
    Edge,
    LayerTiming,
    Link,
    MeshShape,
    Recompute,
    SegmentPlan,
    Shape,
    with_remat,
)
from tests import plans
from tests.plans import profile_of, segment_bytes

PATCHES = 16
SHAPES = [Shape(i, t) for i, t in ((1, 32), (1, 128), (4, 32), (1, 512))]
TILES = [Shape(i, PATCHES) for i in (1, 4, 16)]
# (overhead, per token, per token and row length) of a layer's forward.
LAYER = (1e-4, 3e-6, 2e-8)


def cost(c, shape):
    return c[0] + c[1] * shape.rows * shape.tokens + c[2] * shape.rows * shape.tokens**2


def timings(module, shapes, model=1, c=LAYER):
    """A gradient costs 2 forwards, the ends 2 layers; tensor parallelism halves everything."""
    rows = []
    for shape in shapes:
        f = cost(c, shape) / model
        recompute = {
            "none": Recompute(0.0, 0.0, {}, 80 * f, 40 * f, 4 * f),
            "dots": Recompute(f / 4, f / 2, {}, 30 * f, 20 * f, 6 * f),
            "layers": Recompute(f, 2 * f, {}, 10 * f, 0.0, 9 * f),
        }
        rows.append(
            LayerTiming(module, model, shape, f, 2 * f, 2 * f, 4 * f, 100 * f, recompute=recompute)
        )
    return rows


def profile(rows=None, *, concurrency=100.0, overhead=0.0, entry_share=0.25):
    if rows is None:
        rows = [
            t
            for m, shapes in (("vision", TILES), ("llm", SHAPES))
            for tp in (1, 2)
            for t in timings(m, shapes, tp)
        ]
    return profile_of(
        rows, dict.fromkeys(("vision", "llm"), 4), ends_bytes=600, share=entry_share,
        concurrency=concurrency, task_overhead_s=overhead, piece_tokens={"vision": PATCHES},
    )  # fmt: skip


def predict(model, module, degree, shape, kind):
    return model.predict(module, degree, shape.rows, shape.tokens)[kind]


def test_fit_errors_are_interpolated_between_tile_counts():
    """Twice as dear per tile from 16 tiles on, as where caches end."""

    def tiles_s(n):
        return 1e-3 * n * (2 if n >= 16 else 1)

    shapes = [Shape(n, PATCHES) for n in (2, 8, 16, 64)]
    rows = [LayerTiming("vision", 1, s, *[tiles_s(s.rows)] * 4) for s in shapes]
    model = CostModel(profile(rows))
    for s in shapes:
        assert predict(model, "vision", 1, s, "layer_forward") == pytest.approx(tiles_s(s.rows))
    between = predict(model, "vision", 1, Shape(11, PATCHES), "layer_forward")
    assert tiles_s(11) < between < 2 * tiles_s(11)
    far = predict(model, "vision", 1, Shape(256, PATCHES), "layer_forward")
    assert far == pytest.approx(tiles_s(256), rel=0.05)


@pytest.mark.parametrize(
    "c", [LAYER, (1e-4, 0.0, 0.0), (0.0, 3e-6, 0.0), (0.0, 0.0, 2e-8), (0.0, 1e-6, 1e-9)]
)
def test_exact_coefficients_are_recovered(c):
    model = CostModel(profile(timings("llm", SHAPES, c=c)))
    np.testing.assert_allclose(
        model.fits("llm", 1).coefficients("layer_forward"), c, rtol=1e-6, atol=1e-13
    )
    for shape in (*SHAPES, Shape(7, 48), Shape(1, 2048)):
        for kind, k in {"layer_forward": 1, "layer_backward": 2, "dots.layer_s": 0.25}.items():
            assert predict(model, "llm", 1, shape, kind) == pytest.approx(k * cost(c, shape))


def test_unmeasured_degrees_modules_and_policies_are_errors():
    model = CostModel(profile())
    assert model.priced_policies("llm") == ("none", "dots", "layers", "segment")
    for module, tp, quantity, words in (
        ("llm", 4, "layer_forward", r"'llm' at tensor-parallel degree 4 \(it has \[1, 2\]\)"),
        ("audio", 1, "layer_forward", "no timing of 'audio'"),
        ("llm", 1, "named.layer_s", "no price of the recompute policy 'named' for 'llm'"),
    ):
        with pytest.raises(ValueError, match=words):
            predict(model, module, tp, SHAPES[0], quantity)


def plan_of(stage=1, data=1, model=1, group_size=1, parts=1, edges=(), rounds=1):
    """Vision alone on device 0, the LLM's 4 layers in `parts` segments."""
    size, k, mesh = stage * data * model, 4 // parts, (stage, data, model)
    parts_of = {"vision": [(4, 0)], "llm": [(k + i * k, 1 + i * size, mesh) for i in range(parts)]}
    shapes = {"vision": Shape(3, PATCHES), "llm": Shape(2, 64)}
    plan = plans.graph_plan(None, parts_of, shapes, edges=edges, group_size=group_size)
    vision, *llm = plan.layout.segments
    return plan.with_layout(
        segments=(vision, *(dataclasses.replace(s, rounds=rounds) for s in llm))
    )


def group_s(plan, model, name, direction=FORWARD):
    """Seconds of a segment at the only shape of its module."""
    s = plan.layout.segment(name)
    (shape,) = plan.layout.shapes(s.module)
    mesh = plan.layout.submesh(s.submesh).shape
    return float(
        plans.group_s(model, s, mesh, plan.layout.group_size, shape.rows, shape.tokens, direction)
    )


LOOPS = [(1, 1, 1), (1, 3, 1), (2, 2, 1), (2, 4, 1), (4, 4, 1), (2, 2, 2), (2, 4, 2)]


@pytest.mark.parametrize("stage, group_size, rounds", LOOPS)
def test_stages_take_m_plus_s_minus_1_ticks(stage, group_size, rounds):
    """In rounds M times as many, of as much less each. The entry is run in every tick."""
    plan = plan_of(stage=stage, group_size=group_size, rounds=rounds)
    forward = cost(LAYER, Shape(2, 64))
    ticks = rounds * group_size + stage - 1
    layers = ticks * (4 / stage / rounds) * forward
    ends = (0.25 * ticks + 0.75 * group_size / stage) * 2 * forward
    assert group_s(plan, CostModel(profile()), "llm0") == pytest.approx(layers + ends)


@pytest.mark.parametrize("node, bandwidth, latency_s", [(8, 1e9, 1e-3), (2, 1e8, 1e-2)])
def test_each_tick_sends_hidden_states_to_the_next_stage(node, bandwidth, latency_s):
    """Over the slower links where the stages lie on several nodes."""
    hardware = dataclasses.replace(
        find_hardware("a100-40"),
        devices_per_node=node,
        measured=(Link("ppermute", False, 1e9, 1e-3), Link("ppermute", True, 1e8, 1e-2)),
    )
    plan = plan_of(stage=2, data=2, group_size=4, rounds=2)
    linked = dataclasses.replace(profile(), hardware=hardware)
    took = group_s(plan, CostModel(linked), "llm0") - group_s(plan, CostModel(profile()), "llm0")
    n_bytes = 100 * cost(LAYER, Shape(2, 64))  # see `test_peak_bytes_by_hand`
    assert took == pytest.approx(9 * (latency_s + n_bytes / bandwidth))


@pytest.mark.parametrize(
    "data, model, concurrency, factor",
    [
        (4, 1, 8.0, 1.0),
        (4, 1, 2.0, 2.0),
        (1, 2, 1.0, 1.0),  # the two devices were timed on one core together
        (2, 2, 2.0, 2.0),
    ],
)
def test_devices_that_share_cores_slow_each_other_down(data, model, concurrency, factor):
    plan, costs = plan_of(data=data, model=model), CostModel(profile(concurrency=concurrency))
    alone = 6 * cost(LAYER, Shape(2, 64)) / model
    assert group_s(plan, costs, "llm0") == pytest.approx(alone * factor)
    pairs = CostModel(profile(with_pairs(1e-9), concurrency=concurrency))
    mesh = plan.layout.submesh("llm0").shape
    got, *_ = pairs.segment(plan.layout.segment("llm0"), mesh).content_s(1, FORWARD)
    assert got == pytest.approx(4e-9 * factor)


def with_pairs(forward_s):
    """The timings of `profile()`, and seconds of a pair; a gradient takes twice as many."""
    return [
        dataclasses.replace(
            t,
            content_forward_s={"pair": forward_s},
            content_backward_s={"pair": 2 * forward_s},
            recompute={
                remat: dataclasses.replace(cost, content_s={"pair": forward_s * (remat != "none")})
                for remat, cost in t.recompute.items()
            },
        )
        for t in profile().timings
    ]


@pytest.mark.parametrize("remat, n_forward", [("none", 0), ("layers", 1), ("segment", 0)])
@pytest.mark.parametrize("stage, group_size, rounds", [LOOPS[1], LOOPS[6]])
def test_content_costs_every_layer_in_every_tick(stage, group_size, rounds, remat, n_forward):
    """M + S - 1 ticks are run for M microbatches; nobody reads the segment, so its task also runs
    forward."""
    plan = with_remat(plan_of(stage=stage, group_size=group_size, rounds=rounds), remat)
    model, s = CostModel(profile(with_pairs(2e-9))), plan.layout.segment("llm0")
    mesh = plan.layout.submesh("llm0").shape
    ticks = (rounds * group_size + stage - 1) / rounds  # of a stage's layers
    want = 2e-9 * 4 / stage * ticks / group_size
    for direction, n in ((FORWARD, 1), (BACKWARD, 3 + n_forward)):
        (got,) = model.segment(s, mesh).content_s(group_size, direction)
        assert got == pytest.approx(n * want)
    # What a shape costs without content is what it costs without pairs.
    plain = group_s(plan, CostModel(profile()), "llm0", BACKWARD)
    assert group_s(plan, model, "llm0", BACKWARD) == plain


# A read segment's (passes through its forward, policy of its gradient) in a backward task.
PASSES = {"none": (0, "none"), "dots": (0, "dots"), "layers": (0, "layers"), "segment": (1, "none")}


@pytest.mark.parametrize("remat", PASSES)
@pytest.mark.parametrize("read", [True, False])
def test_backward_task_costs_its_recomputation(remat, read):
    edges = (Edge("vision", "llm", "v"),) if read else ()
    plan = with_remat(plan_of(edges=edges), remat)
    model = CostModel(dataclasses.replace(profile(with_pairs(1e-9)), edges=edges))
    n_forward, policy = PASSES[remat]
    n_forward = n_forward if read else 1
    cost_s = {t.shape: t.recompute[policy] for t in timings("vision", [Shape(3, PATCHES)])}
    one, more = cost(LAYER, Shape(3, PATCHES)), cost_s[Shape(3, PATCHES)]
    want = (n_forward + 2) * (4 + 2) * one + 4 * more.layer_s + more.ends_s
    assert group_s(plan, model, "vision0", BACKWARD) == pytest.approx(want)
    (got,) = model.segment(plan.layout.segment("vision0"), MeshShape()).content_s(1, BACKWARD)
    assert got == pytest.approx(4e-9 * (n_forward + 2 + (policy != "none")))


KEPT = {"none": 80, "dots": 30, "layers": 10, "segment": 80}  # bytes of `timings`, of a forward


@pytest.mark.parametrize("remat", PASSES)
@pytest.mark.parametrize("layers, unrolled, copies", [(9, False, 1), (9, True, 0), (8, False, 0)])
def test_loop_on_a_gpu_copies_its_residuals(layers, unrolled, copies, remat):
    """Four times the seconds of their bytes, in the task that saves them."""
    h100, shape = find_hardware("h100"), Shape(3, PATCHES)
    whole = SegmentPlan("v", "vision", 0, layers, "m", True, True, remat, unrolled=unrolled)
    graph = dataclasses.replace(profile(), edges=(Edge("vision", "llm", "v"),))
    on_gpu = CostModel(dataclasses.replace(graph, hardware=h100))
    saving = BACKWARD if remat == "segment" else FORWARD
    for direction in (FORWARD, BACKWARD):
        got, free = (
            plans.group_s(m, whole, MeshShape(), 1, shape.rows, shape.tokens, direction)
            for m in (on_gpu, CostModel(graph))
        )
        n_bytes = layers * KEPT[remat] * cost(LAYER, shape)
        want = 4 * n_bytes / h100.memory_bandwidth * copies * (direction == saving)
        assert got - free == pytest.approx(want, rel=1e-3, abs=1e-18)
    sharded = dataclasses.replace(whole, zero=3)  # loops in any case
    assert on_gpu.segment(sharded, MeshShape()).copies_residuals
    assert not CostModel(graph).segment(sharded, MeshShape()).copies_residuals


def state_by_hand(params, data, zero, half):
    """Parameters, gradients, AdamW's moments, and masters where parameters are halved."""
    working = params * (0.5 if half else 1.0) / (data if zero == 3 else 1)
    return working + params / (data if zero >= 2 else 1) + params * (3 if half else 2) / data


@pytest.mark.parametrize("remat", PASSES)
@pytest.mark.parametrize("zero, half", [(1, False), (2, True), (3, False), (3, True)])
def test_peak_bytes_by_hand(remat, zero, half):
    """Vision hands over and the LLM does not: what its one task keeps is among its temporaries."""
    layer, ends = 1000, 600
    edges = (Edge("vision", "llm", "v"),)
    plan = plan_of(stage=2, data=2, group_size=4, edges=edges, rounds=2)
    plan = with_remat(plan, remat)
    segments = tuple(dataclasses.replace(s, zero=zero) for s in plan.layout.segments)
    plan = plan.with_layout(segments=segments)
    model = dataclasses.replace(plans.halved(profile()) if half else profile(), edges=edges)
    tiles, llm = cost(LAYER, Shape(3, PATCHES)), cost(LAYER, Shape(2, 64))
    n_forward, policy = PASSES[remat]
    more = {t.shape: t.recompute[policy] for t in timings("llm", [Shape(2, 64)])}[Shape(2, 64)]
    own = tuple(getattr(more, f"{name}_bytes") / llm for name in ("layer", "ends", "temp"))

    def one(forward, layers, rounds, in_flight, fused, ranks, params):
        """Bytes of a segment: the input is 100 forwards of a layer. At the step's end it has its
        reduced gradients, and all new parameters where ranks gather them."""
        kept = 4 * forward * (layers * own[0] + own[1])  # microbatches, and not the ticks
        work = own[2] * forward + forward * (layers / rounds * own[0] + own[1])
        if fused or n_forward:
            work += kept + 2 * 4 * 100 * forward
            kept = 0.0
        reads = layer + ends / 2 * fused  # where the loss is
        whole = (zero == 3) * (0.5 if half else 1.0) * reads
        whole += (zero > 1) * (layer + ends * (not fused))
        work += whole * (ranks > 1)
        gathers = ranks > 1 and zero < 3
        end = (3.2 if gathers else 1.85 if ranks > 1 else 1.0) * params / ranks
        work = max(work, end + gathers * (0.5 if half else 1.0) * params)
        return in_flight * (4 * 100 * forward + kept) + work

    n, n_llm = 4 * layer + ends, 2 * layer + ends
    vision = state_by_hand(n, 1, zero, half) + one(tiles, 4, 1, 2, False, 1, n)
    text = state_by_hand(n_llm, 2, zero, half) + one(llm, 2, 2, 1, True, 2, n_llm)
    peak = peak_bytes(plan.layout, CostModel(model), {"vision0": 2, "llm0": 1})
    assert peak == pytest.approx({"vision0": vision, "llm0": text}, rel=1e-6)  # fits keep 24 bits


def test_segments_on_one_submesh_add_their_bytes():
    """Only one program at a time has temporaries."""
    layout, model, in_flight = plan_of().layout, CostModel(profile()), {"vision0": 1, "llm0": 1}
    apart = peak_bytes(layout, model, in_flight)
    least = min(
        float(segment_bytes(model, s, MeshShape(), 1, shape.rows, shape.tokens).temporaries)
        for s in layout.segments
        for shape in layout.shapes(s.module)
    )
    submeshes = tuple(dataclasses.replace(m, first=0) for m in layout.submeshes)
    shared = peak_bytes(dataclasses.replace(layout, submeshes=submeshes), model, in_flight)
    assert shared == dict.fromkeys(apart, pytest.approx(sum(apart.values()) - least, rel=1e-12))


def test_residuals_include_every_edge_into_a_segment():
    """Two edges into the entry keep two arrays, one between layers 2 and 3 one more there."""
    into = [Edge("vision", "llm", "a"), Edge("vision", "llm", "b")]
    inside = Edge("vision", "llm", "deep", tap="t", leaves=1, enters=3)
    plan = plan_of(parts=2)

    def kept(edges):
        model = CostModel(dataclasses.replace(profile(), edges=tuple(edges)))
        kept = (
            segment_bytes(model, s, MeshShape(), 1, 2, 64, backward=False).residuals
            for s in plan.layout.segments[1:]
        )
        return list(map(float, kept))

    one = 100 * cost(LAYER, Shape(2, 64))
    assert kept([]) == pytest.approx([one, one])
    assert kept(into[:1]) == pytest.approx([one, one])  # its own fields are small
    assert kept(into) == pytest.approx([2 * one, one])
    assert kept([*into, inside]) == pytest.approx([2 * one, 2 * one])


def test_fit_of_one_shape_scales_with_tokens():
    """Two shapes tell of an overhead too; attention takes rows of two lengths and a third shape."""
    one, two = Shape(1, 64), Shape(4, 64)

    def model(*shapes):
        return CostModel(profile(timings("llm", shapes)))

    for other in (Shape(5, 64), Shape(2, 512)):
        want = cost(LAYER, one) * other.size / one.size
        assert predict(model(one), "llm", 1, other, "layer_forward") == pytest.approx(want)
        assert model(one, one).fits("llm", 1).coefficients("hidden").tolist()[::2] == [0.0, 0.0]
    straight = predict(model(one, two), "llm", 1, Shape(7, 64), "layer_forward")
    assert straight == pytest.approx(cost(LAYER, Shape(7, 64)))
    assert model(one, two, Shape(8, 64)).fits("llm", 1).coefficients("layer_forward")[2] == 0.0
