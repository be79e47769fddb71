"""Memory over time, by hand, by brute force over moments, and in closed form."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dflop_jax.plan.memory import (
    ByteTable,
    byte_table,
    memory_of_trace,
    memory_over_time,
    peak_bytes,
)
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import BACKWARD, FORWARD, SEND, Event, LayerTiming, Trace
from dflop_jax.simulate.steps import simulate_step, with_list_order
from dflop_jax.simulate.task_graph import in_flight_limit, segment_links
from dflop_jax.simulate.task_order import peak_groups_in_flight
from tests.plans import profile_of
from tests.simulate.cases import (
    ONE,
    SHAPES,
    TWO,
    batch,
    chain,
    graph,
    names,
    random_case,
    same_prices,
)


def value_at(points, time_s):
    """Value of a step function."""
    return [n_bytes for start, n_bytes in points if start <= time_s][-1]


def shapes_of(schedule):
    return {i: g.shape for i, g in enumerate(schedule.groups)}


def peaks(curves):
    return {name: max(n_bytes for _, n_bytes in points) for name, points in curves.items()}


EVENTS = (
    Event("a0", "a0", 0, FORWARD, 0.0, 1.0),
    Event("a0 → b0", "a0", 0, SEND, 1.0, 1.5),
    Event("a0", "a0", 2, FORWARD, 1.0, 2.0),
    Event("b0", "b0", 1, BACKWARD, 1.5, 4.0),  # group 3 waits here, without a send of its own
    Event("b0", "b0", 3, BACKWARD, 4.0, 6.0),
    Event("a0", "a0", 0, BACKWARD, 4.0, 5.0),
    Event("a0", "a0", 2, BACKWARD, 6.0, 7.0),
)
TABLE = ByteTable(
    {"a0": 100.0, "b0": 1000.0},
    {("a0", ONE): 1.0, ("a0", TWO): 2.0, ("b0", ONE): 10.0, ("b0", TWO): 20.0},
)
GROUPS = {0: ONE, 1: ONE, 2: TWO, 3: TWO}


def test_memory_over_time_of_a_step_by_hand():
    """What another module sends is there when it is read, as nothing says who feeds whom."""
    trace = Trace(0, "x", EVENTS)
    curves = memory_over_time(chain(2, sources=1).layout, trace, GROUPS, TABLE)
    assert curves["a0"] == ((0.0, 101.0), (1.0, 103.0), (5.0, 102.0), (7.0, 100.0))
    assert curves["b0"] == (
        (0.0, 1000.0), (1.5, 1010.0), (4.0, 1020.0), (6.0, 1000.0), (7.0, 1000.0),
    )  # fmt: skip
    moves = {"a0": "b0", "a0 → b0": "b0 → b1", "b0": "b1"}
    one = [replace(e, submesh=moves[e.submesh], segment=moves[e.segment],
                   group=e.group - e.group % 2) for e in EVENTS]  # fmt: skip
    table = ByteTable({}, {("b1", ONE): 10.0, ("b1", TWO): 20.0})
    curves = memory_over_time(chain(2).layout, Trace(0, "x", tuple(one)), GROUPS, table)
    # Group 0 from when its send ends, group 2, which has none, from when its forward ends.
    assert curves["b1"] == (
        (0.0, 0.0), (1.5, 10.0), (2.0, 30.0), (4.0, 20.0), (6.0, 0.0), (7.0, 0.0),
    )  # fmt: skip


def test_no_event_holds_the_constant_and_unknown_groups_nothing():
    plan = chain(2, sources=1)
    table = ByteTable({"a0": 5.0}, {("b0", ONE): 7.0})
    assert memory_over_time(plan.layout, Trace(0, "x", ()), {}, table) == {
        "a0": ((0.0, 5.0),),
        "b0": ((0.0, 0.0),),
    }
    trace = simulate_step(plan, batch(plan, 1), same_prices(plan, 1.0, 1.0, 1.0), names(plan))
    assert peaks(memory_over_time(plan.layout, trace, {}, table)) == {"a0": 5.0, "b0": 0.0}


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
@pytest.mark.parametrize("m", [1, 2, 9])
@pytest.mark.parametrize("stages", [2, 4])
def test_first_stage_holds_the_groups_in_flight_of_its_order(order, m, stages):
    """GPipe holds all groups at once; 1F1B the classical depth, with one more in flight."""
    plan = chain(stages, sources=1, order=order)
    schedule, priced = batch(plan, m), same_prices(plan, 1.0, 2.0, 3.0)
    schedule = with_list_order(plan, schedule, priced, names(plan))
    trace = simulate_step(plan, schedule, priced, names(plan))
    table = ByteTable({}, {(n, ONE): 1.0 for n in names(plan)})
    peak = peaks(memory_over_time(plan.layout, trace, shapes_of(schedule), table))
    limit = in_flight_limit(plan)["a0"]
    assert peak["a0"] == (m if order == "gpipe" else min(m, limit))
    assert peak["a0"] == peak_groups_in_flight(schedule.order)["a0"]


def test_memory_at_every_moment_equals_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(40):
        plan, schedule, priced, trainable = random_case(rng, sends=True)
        trace = simulate_step(plan, schedule, priced, trainable)
        kept = {(n, s): float(rng.integers(1, 9)) for n in names(plan) for s in SHAPES}
        constant = {m.name: float(rng.integers(0, 50)) for m in plan.layout.submeshes}
        shapes = shapes_of(schedule)
        curves = memory_over_time(plan.layout, trace, shapes, ByteTable(constant, kept))
        spans = {
            (s.name, g): span
            for s in plan.layout.segments
            for g, group in enumerate(schedule.groups)
            if group.module == s.module and (span := input_span(plan, schedule, trace, s.name, g))
        }
        edges = sorted({t for e in trace.events for t in (e.start_s, e.end_s)})
        for moment in [(a + b) / 2 for a, b in itertools.pairwise(edges) if b - a > 1e-9]:
            want = dict(constant)
            for (name, g), (came, went) in spans.items():
                if came < moment < went:
                    want[plan.layout.segment(name).submesh] += kept[name, shapes[g]]
            got = {name: value_at(points, moment) for name, points in curves.items()}
            assert got == pytest.approx(want)


def input_span(plan, schedule, trace, name, g):
    """When a segment has a group's input, by hand: from the first of what is sent to it."""
    mine = [e for e in trace.events if (e.segment, e.group) == (name, g)]
    mine = [e for e in mine if e.direction in (FORWARD, BACKWARD)]
    if not mine:
        return None
    here, came = plan.layout.segment(name).submesh, []
    for link in segment_links(plan.layout):
        if link.target == name and link.edge is None:
            source = plan.layout.segment(link.source)
            ends = [e for e in trace.events if (e.segment, e.group) == (source.name, g)]
            over = f"{source.submesh} → {here}"
            sends = [e for e in ends if e.direction == SEND and e.submesh == over]
            forwards = [e for e in ends if e.direction == FORWARD]
            came += [e.end_s for e in (sends[:1] or forwards)]
    return min(came, default=min(e.start_s for e in mine)), max(e.end_s for e in mine)


def profile_of_plan(plan, **fields):
    """A profile of a plan's modules: 8 bytes of hidden states a token, no other temporaries."""
    timings = tuple(
        LayerTiming(m, 1, s, 1.0, 1.0, 1.0, 1.0, 8.0 * s.size)
        for m in plan.layout.modules
        for s in SHAPES
    )
    layers = {m: plan.layout.segments_of(m)[-1].stop for m in plan.layout.modules}
    return profile_of(timings, layers, concurrency=8.0, **fields)


def test_byte_table_adds_up_to_peak_bytes():
    """Constant and kept inputs add up to what the planner counts for the largest shape."""
    plan = graph("a", "b:2", edges=["ab"])
    model = profile_of_plan(plan, edges=plan.layout.edges)
    table = byte_table(plan.layout, model)
    in_flight = {"a0": 3, "b0": 2, "b1": 1}
    whole = peak_bytes(plan.layout, CostModel(model), in_flight)
    assert peak_bytes(plan.layout, CostModel(model), dict.fromkeys(in_flight, 0)) == pytest.approx(
        table.constant_bytes
    )
    for name, n in in_flight.items():
        most = max(table.group_bytes[name, shape] for shape in SHAPES)
        assert table.constant_bytes[name] + n * most == pytest.approx(whole[name])
        assert table.group_bytes[name, TWO] == 2 * table.group_bytes[name, ONE] == 8.0 * TWO.size
    # Parameters, gradients and two moments of a layer and of the ends; beside them what reducing
    # gradients takes, or hidden states and their gradients in the task that ends the chain.
    ends = 2 * 8.0 * TWO.size
    reduced = {"a0": 2000.0, "b0": 1500.0, "b1": max(1500.0, ends)}
    state = {"a0": 8000.0, "b0": 6000.0, "b1": 6000.0}
    assert table.constant_bytes == pytest.approx({s: state[s] + reduced[s] for s in state})


def test_memory_of_a_saved_trace():
    plan, trace = chain(2, sources=1), Trace(0, "run", EVENTS)
    model = profile_of_plan(plan)
    named = {g: f"{'ab'[g % 2]}:{s.name}" for g, s in GROUPS.items()}
    got = memory_of_trace(plan.layout, model, trace, named)
    assert got == memory_over_time(plan.layout, trace, GROUPS, byte_table(plan.layout, model))
    for bad in ({**named, 3: "b:9x9"}, {**named, 3: "c:1x64"}, {0: "a:1x64"}):
        with pytest.raises(ValueError, match="does not name a shape of the plan"):
            memory_of_trace(plan.layout, model, trace, bad)
    stray = Trace(0, "run", (Event("z", "z", -1, "update", 0.0, 1.0),))
    with pytest.raises(ValueError, match="of another plan"):
        memory_of_trace(plan.layout, model, stray, {})
