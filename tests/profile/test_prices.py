"""Prices by hand, from the fit and the collectives, which have tests of their own."""

import dataclasses
from math import prod

import pytest

from dflop_jax import records
from dflop_jax.hardware import find_hardware
from dflop_jax.profile.collectives import all_gather_s, reduce_scatter_s, send_s
from dflop_jax.profile.cost_model import CostModel, layout_prices
from dflop_jax.records import BACKWARD, FORWARD, NO_GROUP, REDUCE, UPDATE, Bucket, Shape, Task
from tests.plans import graph_plan, group_s, halved, profile_of

HARDWARE = dataclasses.replace(find_hardware("a100-80"), devices_per_node=4)
PARAMS = {"a": 24_000, "b": 43_200}  # of all layers and both ends
LAYERS = {"a": 2, "b": 4}


def profile(tied=()):
    """Module `a` takes pieces of 16 tokens, `b` packs; a layer's gradient costs two forwards."""
    timings = [
        records.LayerTiming(m, model, Shape(rows, tokens), f, 2 * f, f, 2 * f, 10.0 * rows * tokens)
        for m, shapes in (("a", [(1, 16), (4, 16)]), ("b", [(1, 32), (1, 128), (4, 64)]))
        for model in (1, 2)
        for rows, tokens in shapes
        for f in [1e-6 * rows * tokens / model]
    ]
    return profile_of(
        timings, LAYERS, layer_bytes=9_600, ends_bytes=4_800, share=0.3, concurrency=8.0,
        task_overhead_s=1e-4, edges=(records.Edge("a", "b", "f"),), tied=tuple(tied),
        piece_tokens={"a": 16},
    )  # fmt: skip


def linked(tied=()):
    """The profile with links that take time."""
    return dataclasses.replace(profile(tied), hardware=HARDWARE)


def plan(a=(1, 1, 1), b=(1, 1, 1), *, segments=1, group_size=1, edges=1, tied=()):
    """`a` on the first devices, the 4 layers of `b` in segments on those that follow."""
    k, size = 4 // segments, prod(b)
    parts = {
        "a": [(2, 0, a)],
        "b": [(k + i * k, prod(a) + i * size, b) for i in range(segments)],
    }
    text = (Shape(1, 64), Shape(2, 32), Shape(1, 96))
    shapes = ({"a": Shape(2, 16), "b": text[0]}, {"b": text[1]}, {"a": Shape(2, 16), "b": text[2]})
    edges = tuple(records.Edge("a", "b", f"f{i}") for i in range(edges))
    made = graph_plan(None, parts, shapes[0], edges=edges, group_size=group_size, tied=tuple(tied))
    return made.with_layout(buckets=tuple(map(Bucket.from_shapes, shapes)))


def with_zero(p, zero, shard_devices=0):
    segments = (dataclasses.replace(s, zero=zero, shard_devices=shard_devices)
                for s in p.layout.segments)  # fmt: skip
    return p.with_layout(segments=tuple(segments))


def prices_of(p, of_profile):
    return layout_prices(p.layout, CostModel(of_profile))


def test_every_program_has_a_price_by_its_shape():
    p, costs = plan(b=(2, 1, 1), group_size=2), CostModel(profile())
    prices = prices_of(p, profile())
    assert prices.concurrency == 8.0
    want = {("a0", Shape(2, 16))} | {("b0", Shape(*s)) for s in ((1, 64), (2, 32), (1, 96))}
    assert {(k.segment, k.shape) for k in prices.programs} == want
    assert len(prices.programs) == 2 * len(want)
    for k, price in prices.programs.items():
        s = p.layout.segment(k.segment)
        mesh = p.layout.submesh(s.submesh).shape
        got = group_s(costs, s, mesh, 2, k.shape.rows, k.shape.tokens, k.direction)
        assert (price.static_s, any(price.content_s)) == (float(got), False)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_task_holds_the_work_of_the_host(device):
    """Beside the devices', where these are cores of the host; else only where theirs is shorter."""
    alone = profile()
    host_s = sorted(p.static_s for p in prices_of(plan(), alone).programs.values())[2]
    own = dataclasses.replace(alone, device=device, host_s=host_s)
    before, after = (prices_of(plan(), p) for p in (alone, own))
    assert (after.host_s, after.shares_cores) == (host_s, device == "cpu")
    for k, price in before.programs.items():
        took_s = {"cpu": price.static_s + host_s, "gpu": max(price.static_s, host_s)}[device]
        assert after.programs[k].static_s == pytest.approx(took_s)


@pytest.mark.parametrize("first, across, edges", [(2, False, 1), (3, True, 1), (4, True, 2)])
def test_what_a_module_sends_another(first, across, edges):
    """The reader's hidden states of a group, to each of its devices, for every edge."""
    p = plan((1, first, 1), (2, 1, 1), group_size=2, edges=edges)
    sends = prices_of(p, linked()).sends
    assert len(sends) == 2 * 3
    for shape in p.layout.shapes("b"):
        took = edges * send_s(10.0 * shape.size * 2, HARDWARE, across=across)
        for direction in (FORWARD, BACKWARD):
            assert sends[records.SendId("a0", "b0", shape, direction)] == pytest.approx(took)


def test_what_passes_between_segments_of_one_module():
    sends = prices_of(plan(segments=2), linked()).sends
    ends = {("a0", "b0"), ("b0", "b1")}
    assert {(k.source, k.target) for k in sends} == ends
    assert len(sends) == 2 * 3 * 2
    one = records.SendId("b0", "b1", Shape(2, 32), BACKWARD)
    assert sends[one] == pytest.approx(send_s(640.0, HARDWARE, across=False))


def test_no_time_on_the_same_devices_or_without_hardware():
    p = plan()
    p = p.with_layout(submeshes=tuple(dataclasses.replace(m, first=0) for m in p.layout.submeshes))
    assert prices_of(p, linked()).sends == {}
    prices = prices_of(plan((1, 2, 1), (1, 1, 2), group_size=2), profile())
    assert prices.sends == {}
    assert set(prices.step_end.values()) == {0.0}


def test_step_ends_with_reduction_and_update():
    got = prices_of(plan((1, 3, 2), (1, 8, 1)), linked()).step_end
    for name, tp, ranks in (("a0", 2, 3), ("b0", 1, 8)):
        own = PARAMS[name[0]] / tp
        reduced = reduce_scatter_s(own, ranks, HARDWARE, stride=tp)
        assert got[Task(name, NO_GROUP, REDUCE)] == pytest.approx(reduced)
        update = all_gather_s(own, ranks, HARDWARE, stride=tp)
        update += 7 * own / ranks / HARDWARE.memory_bandwidth
        assert got[Task(name, NO_GROUP, UPDATE)] == pytest.approx(update)


@pytest.mark.parametrize("half, overlap", [(False, 1.0), (True, 1.0), (False, 0.0), (True, 0.25)])
def test_what_data_ranks_share_is_brought_by_the_programs(half, overlap):
    """Degree 3 gathers parameters layer by layer, 2 and 3 scatter gradients; the step's end has
    less to do."""
    ranks, model = 4, halved(linked()) if half else linked()
    node = dataclasses.replace(HARDWARE, link_overlap=overlap, network_overlap=0.7)
    model = dataclasses.replace(model, hardware=node)
    base = plan((1, ranks, 1), (1, ranks, 1))
    by_degree = {zero: prices_of(with_zero(base, zero), model) for zero in (1, 2, 3)}
    share, layer, ends = 0.5 if half else 1.0, 9_600, 4_800
    update = 7 * PARAMS["a"] / ranks / HARDWARE.memory_bandwidth
    gathered = all_gather_s(PARAMS["a"] * share, ranks, HARDWARE)
    for zero, reduces, gathers in ((1, True, True), (2, False, True), (3, False, False)):
        end = by_degree[zero].step_end
        reduced = reduce_scatter_s(PARAMS["a"], ranks, HARDWARE) * reduces
        assert end[Task("a0", NO_GROUP, REDUCE)] == pytest.approx(reduced)
        want = update + gathered * gathers
        assert end[Task("a0", NO_GROUP, UPDATE)] == pytest.approx(want)
    # Two layers hide a share of what is moved, but not the first layer's and the ends'.
    bring = sum(all_gather_s(n * share, ranks, HARDWARE) for n in (layer, ends))
    scatter = sum(reduce_scatter_s(n, ranks, HARDWARE) for n in (layer, ends))
    for direction, more in ((FORWARD, (0.0, bring)), (BACKWARD, (scatter, bring + scatter))):
        key = records.ProgramId("a0", Shape(2, 16), direction)
        took = [by_degree[zero].programs[key].static_s for zero in (1, 2, 3)]
        compute_s = 1e-6 * 32 * (2 if direction == BACKWARD else 1)
        for zero, extra in zip((2, 3), more, strict=True):
            layer_s = (zero == 3) * all_gather_s(layer * share, ranks, HARDWARE)
            layer_s += (direction == BACKWARD) * reduce_scatter_s(layer, ranks, HARDWARE)
            hidden = max(0.0, layer_s - compute_s)
            waits = 2 * (overlap * hidden + (1 - overlap) * layer_s)
            assert took[zero - 1] - took[0] == pytest.approx(extra + waits)


@pytest.mark.parametrize(
    "ranks, readers, node, edges, home",  # `home`: share of ranks that collect what is read
    [(1, 1, 4, 1, 1), (2, 2, 4, 1, 1), (2, 2, 1, 2, 1), (6, 12, 3, 1, 1), (6, 3, 3, 1, 1 / 2)],
)
def test_data_ranks_exchange_features(ranks, readers, node, edges, home):
    """On the source's ranks, wherever the reader is: each of n ranks sends 1/n of its features to
    each other rank, forward and back; if few ranks collect them, these get more. In arrival order
    samples stay on their ranks."""
    own = dataclasses.replace(HARDWARE, devices_per_node=node)
    without, base = profile(), plan((1, ranks, 1), (1, readers, 1), group_size=2, edges=edges)
    timings = [dataclasses.replace(t, output_bytes=1e5 * t.shape.rows) for t in without.timings]
    model = dataclasses.replace(
        without, timings=tuple(timings), edges=base.layout.edges, hardware=own
    )
    before, after = (prices_of(base, m).programs for m in (without, model))
    arrived = layout_prices(base.layout, CostModel(model), "arrival").programs
    inside, across = (0.78 * b for b in (own.link_bandwidth, own.network_bandwidth))
    sent = 2 * 2 * 1e5 / ranks  # bytes from one rank to another: two rows, two microbatches
    link_s, network_s = (
        sent / inside + own.link_latency_s,
        sent / across + own.network_latency_s,
    )
    want = {(1, 4): 0.0, (2, 4): 8.4e-6 + link_s, (2, 1): 8.4e-6 + network_s}
    # Two nodes of three: a third to each in the node, half to the other node.
    halves = 3 * sent / across + own.network_latency_s
    want[6, 3] = 8.4e-6 + 2 * (2 * sent / inside + own.link_latency_s) + halves
    for key, price in after.items():
        more_s = edges / home * want[ranks, node] * (key.segment == "a0")
        assert price.static_s == pytest.approx(before[key].static_s + more_s, rel=1e-9)
        assert arrived[key].static_s == pytest.approx(before[key].static_s, rel=1e-9)


def test_blocks_gather_inside_and_add_up_between():
    """Two nodes of 4: what is shared within a node travels there, layer by layer; what the step
    adds up between nodes is a rank's part, once."""
    base, model = plan((1, 8, 1)), linked()

    def prices(zero, devices):
        return prices_of(with_zero(base, zero, devices), model)

    part = PARAMS["a"] / 4
    between = sum(of(part, 2, HARDWARE, stride=4) for of in (reduce_scatter_s, all_gather_s))
    assert between > 2e-5  # a network's, not a node's
    update = 7 * part / HARDWARE.memory_bandwidth
    within = reduce_scatter_s(PARAMS["a"], 4, HARDWARE)
    for zero in (1, 2, 3):
        end = prices(zero, 4).step_end
        reduced = end[Task("a0", NO_GROUP, REDUCE)]
        assert reduced == pytest.approx(between + within * (zero == 1))
        gathered = all_gather_s(PARAMS["a"], 4, HARDWARE) * (zero < 3)
        assert end[Task("a0", NO_GROUP, UPDATE)] == pytest.approx(update + gathered)
    four = prices_of(with_zero(plan((1, 4, 1)), 3), model).programs
    for key, price in prices(3, 4).programs.items():
        assert price.static_s == pytest.approx(four[key].static_s) or key.segment != "a0"
    # Blocks of 3 devices do not divide 8 ranks.
    assert prices(3, 3) == prices(3, 0)


def test_tied_ends_apart_hold_their_parameters_twice_and_send_them():
    loose = prices_of(plan(segments=2), linked()).step_end
    tied = prices_of(plan(segments=2, tied=["b"]), linked(["b"])).step_end
    update = 7 * 2_400 / HARDWARE.memory_bandwidth  # the other half of the ends, on one rank
    send = send_s(4_800, HARDWARE)
    for name, more_s in (("b0", 0.0), ("b1", send)):
        for direction, update_s in ((REDUCE, 0.0), (UPDATE, update)):
            task = Task(name, NO_GROUP, direction)
            assert tied[task] == pytest.approx(loose[task] + more_s + update_s)
