"""Memory over time, by hand, by brute force over moments, and in closed form."""

import itertools

import numpy as np
import pytest

from dflop_jax.plan.memory import (
    ByteTable,
    MemoryOption,
    ModuleOptions,
    block_minimum,
    byte_table,
    memory_of_trace,
    memory_over_time,
    peak_bytes,
)
from dflop_jax.profile.cost_model import CostModel
from dflop_jax.records import BACKWARD, FORWARD, SEND, Event, LayerTiming, Trace
from dflop_jax.simulate.steps import simulate_step
from dflop_jax.simulate.task_graph import segment_links
from tests.plans import profile_of
from tests.simulate.cases import ONE, SHAPES, TWO, chain, graph, names, random_case


def value_at(points, time_s):
    """Value of a step function."""
    return [n_bytes for start, n_bytes in points if start <= time_s][-1]


EVENTS = (
    Event("a0", "a0", 0, FORWARD, 0.0, 1.0),
    Event("a0 → b0", "a0", 0, SEND, 1.0, 1.5),
    Event("a0", "a0", 2, FORWARD, 1.0, 2.0),
    Event("b0", "b0", 1, BACKWARD, 1.5, 4.0),  # group 3 waits here, without a send of its own
    Event("b0", "b0", 3, BACKWARD, 4.0, 6.0),
    Event("a0", "a0", 0, BACKWARD, 4.0, 5.0),
    Event("a0", "a0", 2, BACKWARD, 6.0, 7.0),
)
GROUPS = {0: ONE, 1: ONE, 2: TWO, 3: TWO}


def test_memory_at_every_moment_equals_brute_force():
    rng = np.random.default_rng(0)
    for _ in range(40):
        plan, schedule, priced, trainable = random_case(rng, sends=True)
        trace = simulate_step(plan, schedule, priced, trainable)
        kept = {(n, s): float(rng.integers(1, 9)) for n in names(plan) for s in SHAPES}
        constant = {m.name: float(rng.integers(0, 50)) for m in plan.layout.submeshes}
        shapes = {i: g.shape for i, g in enumerate(schedule.groups)}
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
        with pytest.raises(ValueError, match="do not name a shape of the plan"):
            memory_of_trace(plan.layout, model, trace, bad)
    stray = Trace(0, "run", (Event("z", "z", -1, "update", 0.0, 1.0),))
    with pytest.raises(ValueError, match="belongs to another plan"):
        memory_of_trace(plan.layout, model, stray, {})


def test_modules_that_share_devices_fit_if_any_combination_does():
    """Each module has 5 bytes live and 4 temporary, or 2 and 8: together at least 4 + 8."""
    need = 0, np.reshape([5.0, 2.0], (2, 1, 1)), np.reshape([4.0, 8.0], (2, 1, 1))
    module = ModuleOptions((MemoryOption(),) * 2, (need,), (np.zeros((4, 2, 1, 1)),))
    for limit, fits in ((11.9, False), (12.0, True)):
        assert block_minimum([module, module], limit).fits.tolist() == [[fits]]
