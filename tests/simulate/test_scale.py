"""A step on 1,024 devices, and one of many groups: function calls grow with the events."""

import sys

import pytest

from dflop_jax.records import BACKWARD, FORWARD, REDUCE, RETURN, SEND, SubmeshPlan
from dflop_jax.simulate.steps import Noise, simulate_step
from tests.simulate.cases import batch, graph, names, prices


def simulate(n_groups):
    """Two segments of a module on 64 devices each, which 16 segments of 56 read."""
    plan, submeshes, first = graph("a:2", "b:16", edges=["ab"]), [], 0
    for m in plan.layout.submeshes:
        submeshes.append(SubmeshPlan(m.name, first, 1, 64 if m.name[0] == "a" else 56, 1))
        first = submeshes[-1].devices.stop
    plan = plan.with_layout(submeshes=tuple(submeshes))
    both, noise = (FORWARD, BACKWARD), Noise(sigma=0.05, stragglers={"b0": 1.2})
    seconds = {(n, d): 0.05 if d == FORWARD else 0.1 for n in names(plan) for d in (*both, REDUCE)}
    sends = {(u, s, d): 0.004 for u in names(plan) for s in names(plan) for d in both}
    priced = prices(plan, seconds, sends)
    return plan, simulate_step(plan, batch(plan, n_groups), priced, names(plan), noise=noise)


@pytest.mark.parametrize("n_groups", [0, 1, 64])
def test_a_thousand_devices_give_one_event_per_task_and_send(n_groups):
    plan, trace = simulate(n_groups)
    assert plan.layout.n_devices == 1024
    segments = len(plan.layout.segments)
    sent = [e for e in trace.events if e.direction in (SEND, RETURN)]
    assert len(sent) == n_groups * 2 * (segments - 1)
    tasks = n_groups * (2 * segments - 1) + 2 * segments  # all but the last forward; reduce, update
    assert len(trace.events) == tasks + len(sent) <= 5000


def calls(run):
    """Function calls of a piece of work, whatever the machine does meanwhile."""
    count = 0

    def tick(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(tick)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def test_simulation_work_is_linear_in_events():
    fixed = calls(lambda: simulate(0))
    once, twice = (calls(lambda n=n: simulate(n)) - fixed for n in (16, 32))
    assert twice < 2.3 * once
    assert once < 600 * 16 * 18  # calls per group and segment
