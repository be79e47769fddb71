"""Memory over time against counting by hand, a brute force over moments, and closed forms."""

import itertools

import numpy as np
import pytest

from dflop_jax.pipeline.order import in_flight_limit
from dflop_jax.profile.fit import CostModel
from dflop_jax.records import BACKWARD, FORWARD, SEND, Event, Trace
from dflop_jax.sim.memory import ByteTable, byte_table, memory_over_time, peak_bytes, peaks
from dflop_jax.sim.pipeline import simulate_step
from tests.plans import NANO, chain, nano_profile
from tests.sim.test_conditions import random_sends
from tests.sim.test_simulate import names, random_case, same_seconds


def at(points, time_s):
    """Value of a step function."""
    return [held for start, held in points if start <= time_s][-1]


def test_a_step_by_hand():
    plan = chain(2, vision=1)
    events = (
        Event("v0", "v0", 0, FORWARD, 0.0, 1.0),
        Event("v0 → l0", "v0", 0, SEND, 1.0, 1.5),
        Event("v0", "v0", 1, FORWARD, 1.0, 2.0),
        Event("l0", "l0", 0, BACKWARD, 1.5, 4.0),  # group 1 waits here, without a send of its own
        Event("l0", "l0", 1, BACKWARD, 4.0, 6.0),
        Event("v0", "v0", 0, BACKWARD, 4.0, 5.0),
        Event("v0", "v0", 1, BACKWARD, 6.0, 7.0),
    )
    table = ByteTable(
        {"v0": 100.0, "l0": 1000.0}, {("v0", 0): 1.0, ("v0", 1): 2.0, ("l0", 0): 10.0}
    )
    table.kept["l0", 1] = 20.0
    curves = memory_over_time(plan, Trace(0, "x", events), {0: 0, 1: 1}, table)
    assert curves["v0"] == ((0.0, 101.0), (1.0, 103.0), (5.0, 102.0), (7.0, 100.0))
    assert curves["l0"] == (
        (0.0, 1000.0), (1.5, 1010.0), (2.0, 1030.0), (4.0, 1020.0), (6.0, 1000.0), (7.0, 1000.0),
    )  # fmt: skip
    assert peaks(curves) == {"v0": 103.0, "l0": 1030.0}


def test_no_event_holds_the_constant_and_unknown_groups_nothing():
    plan = chain(2, vision=1)
    table = ByteTable({"v0": 5.0}, {("l0", 0): 7.0})
    assert memory_over_time(plan, Trace(0, "x", ()), {}, table) == {
        "v0": ((0.0, 5.0),),
        "l0": ((0.0, 0.0),),
    }
    trace = simulate_step(plan, [0], same_seconds(plan, 1.0, 1.0, 1.0), names(plan))
    assert peaks(memory_over_time(plan, trace, {}, table)) == {"v0": 5.0, "l0": 0.0}


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
@pytest.mark.parametrize("m", [1, 2, 9])
@pytest.mark.parametrize("stages", [2, 4])
def test_the_first_stage_holds_what_its_order_says(order, m, stages):
    """GPipe holds all groups at once; 1F1B the classical depth, with one more in flight."""
    plan = chain(stages, vision=1, order=order)
    trace = simulate_step(plan, [0] * m, same_seconds(plan, 1.0, 2.0, 3.0), names(plan))
    table = ByteTable({}, {(n, 0): 1.0 for n in names(plan)})
    peak = peaks(memory_over_time(plan, trace, dict.fromkeys(range(m), 0), table))
    limit = in_flight_limit(plan)["v0"]
    assert peak["v0"] == (m if order == "gpipe" else min(m, limit))


def test_every_moment_holds_the_inputs_that_are_in_use():
    rng = np.random.default_rng(0)
    for _ in range(60):
        plan, buckets, seconds, trainable = random_case(rng)
        sends = random_sends(rng, plan)
        trace = simulate_step(plan, buckets, seconds, trainable, sends=sends)
        kept = {(n, b): float(rng.integers(1, 9)) for n in names(plan) for b in (0, 1)}
        constant = {m.name: float(rng.integers(0, 50)) for m in plan.submeshes}
        curves = memory_over_time(plan, trace, dict(enumerate(buckets)), ByteTable(constant, kept))
        edges = sorted({t for e in trace.events for t in (e.start_s, e.end_s)})
        for moment in [(a + b) / 2 for a, b in itertools.pairwise(edges) if b - a > 1e-9]:
            want = dict(constant)
            for s in plan.segments:
                for g, b in enumerate(buckets):
                    if held(trace, names(plan), s.name, g, moment):
                        want[s.submesh] += kept[s.name, b]
            got = {name: at(points, moment) for name, points in curves.items()}
            assert got == pytest.approx(want)


def held(trace, chained, name, g, moment):
    """Whether a chain's segment has its input at a moment: it came and is not used up."""
    mine = [e for e in trace.events if (e.segment, e.group) == (name, g) and e.direction != SEND]
    mine = [e for e in mine if e.direction in (FORWARD, BACKWARD)]
    if not mine:
        return False
    at = chained.index(name)
    came = min(e.start_s for e in mine)
    for e in trace.events:  # the last of the producer's forward and its send
        if at and (e.segment, e.group) == (chained[at - 1], g) and e.direction in (FORWARD, SEND):
            came = e.end_s
    return came < moment < max(e.end_s for e in mine)


def test_the_table_of_a_profile_matches_its_peak():
    """Constant and kept inputs add up to what the planner counts for the largest bucket."""
    model = nano_profile().model
    model = type(model)(
        **{
            **{k: getattr(model, k) for k in model.__dataclass_fields__},
            "timings": tuple(
                type(t)(
                    t.module, t.model, t.shape, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 8.0 * t.shape.size
                )
                for t in model.timings
            ),
        }
    )
    table = byte_table(NANO, model)
    in_flight = {"vision": 3, "llm": 2}
    whole = peak_bytes(NANO, CostModel(model), in_flight)
    for name, n in in_flight.items():
        most = max(table.kept[name, b] for b in range(len(NANO.buckets)))
        assert table.constant[name] + n * most == pytest.approx(whole[name])
        assert table.kept[name, 0] > table.kept[name, 1] > 0
