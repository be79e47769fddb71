"""A step on 1,024 devices: events and work are counted, never timed."""

import sys

import pytest

import dflop_jax.sim.pipeline as pipeline
from benchmarks.simulator_speed import make_plan, make_times
from dflop_jax.records import RETURN, SEND
from dflop_jax.sim.pipeline import Noise, simulate_step


def simulate(n_groups, llm=16, devices=56, vision=64):
    plan = make_plan(llm, devices, vision)
    seconds, sends = make_times(plan)
    names = [s.name for s in plan.segments]
    noise = Noise(sigma=0.05, stragglers={"llm0": 1.2})
    return plan, simulate_step(plan, [0] * n_groups, seconds, names, sends=sends, noise=noise)


@pytest.mark.parametrize("n_groups", [0, 1, 64])
def test_a_thousand_devices_take_an_event_per_task_and_send(monkeypatch, n_groups):
    runs = []
    monkeypatch.setattr(pipeline, "run", lambda *args: runs.append(run(*args)) or runs[-1])
    run = sys.modules["dflop_jax.sim.engine"].run
    plan, trace = simulate(n_groups)
    assert plan.n_devices == 1024
    segments = len(plan.segments)
    sent = [e for e in trace.events if e.direction in (SEND, RETURN)]
    assert len(sent) == n_groups * 2 * (segments - 1)
    tasks = n_groups * (2 * segments - 1) + 2 * segments  # all but the last forward; reduce, update
    assert len(trace.events) == tasks + len(sent) <= 5000
    assert runs[0].turns <= len(trace.events)


def calls(n_groups):
    """Function calls of a simulated step: its work, whatever the machine does meanwhile."""
    count = 0

    def tick(frame, event, arg):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(tick)
    try:
        simulate(n_groups)
    finally:
        sys.setprofile(None)
    return count


def test_work_grows_with_the_events_and_not_with_their_square():
    fixed = calls(0)
    once, twice = calls(16) - fixed, calls(32) - fixed
    assert twice < 2.3 * once
    assert once < 600 * 16 * 18  # calls per group and segment
