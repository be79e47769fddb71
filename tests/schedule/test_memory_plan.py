"""Groups that keep more: near the best choice, against memory counted task by task."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from dflop_jax.records import BACKWARD, FORWARD, Price, Prices, ProgramId, ResidualBytes, Schedule
from dflop_jax.schedule.memory_plan import (
    DeviceMemory,
    ResidualItem,
    choose_items,
    peak_residual_bytes,
    with_memory_plan,
)
from dflop_jax.simulate.steps import simulate_step, with_list_order
from dflop_jax.simulate.task_graph import in_flight_limit, segment_resources, submesh_resources
from tests.simulate.cases import SHAPES, batch, graph, names, random_case, same_prices

MIB = 2.0**20


def random_device(rng, n):
    """Items that are held at some of six moments, in whole MiB."""
    room = tuple(float(x) * MIB for x in rng.integers(0, 12, 6))
    items = []
    for i in range(n):
        first, stop = sorted(int(x) for x in rng.choice(7, 2, replace=False))
        saved_s, extra = float(rng.exponential()), float(rng.integers(0, 6)) * MIB
        items.append(ResidualItem("s", i, saved_s, extra, first, stop))
    return DeviceMemory(tuple(items), room)


def saved_s(device, choice):
    return sum(device.items[i].saved_s for i in choice)


def fits(device, choice):
    return all(
        sum(device.items[i].extra_bytes for i in choice
            if device.items[i].first <= t < device.items[i].stop) <= room
        for t, room in enumerate(device.free_bytes_at)
    )  # fmt: skip


def test_chosen_items_fit_and_save_nearly_as_much_as_any():
    shares = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        device = random_device(rng, n := int(rng.integers(0, 10)))
        choice = choose_items(device)
        assert fits(device, choice)
        every = (c for k in range(n + 1) for c in combinations(range(n), k))
        best_s = max(saved_s(device, c) for c in every if fits(device, c))
        shares.append(saved_s(device, choice) / best_s if best_s else 1.0)
    assert np.mean(shares) > 0.97


def second_policies(rng, plan, prices, free):
    """The plan and prices of segments that save half of a backward for as much memory again."""
    segments = tuple(
        replace(s, remat="layers", remat_less="none") if rng.random() < 0.8 else s
        for s in plan.layout.segments
    )
    less = {s.name for s in segments if s.remat_less}
    kept = tuple(
        ResidualBytes(n, shape, 4 * MIB * shape.rows, float(rng.integers(1, 9)) * MIB * (n in less))
        for n in names(plan)
        for shape in SHAPES
    )
    programs = dict(prices.programs)
    for p, price in prices.programs.items():
        if p.segment in less:
            half = 0.5 if p.direction == BACKWARD else 1.0
            programs[replace(p, remat_less=True)] = replace(price, static_s=half * price.static_s)
    of = submesh_resources(plan.layout)
    by_resource = {r: free * MIB * float(rng.integers(0, 3)) for r in of.values()}
    plan = plan.with_layout(segments=segments).with_scheduling(residuals=kept)
    plan = plan.with_scheduling(free_bytes={m: by_resource[r] for m, r in of.items()})
    return plan, replace(prices, programs=programs)


def held(plan, schedule):
    """Bytes of each resource after every task of its that opens a group, counted anew each time."""
    kept = {(k.segment, k.shape): k for k in plan.scheduling.residuals}
    of = segment_resources(plan.layout)
    tasks = {(t.segment, t.group, t.direction) for t in schedule.order}
    for at, last in enumerate(schedule.order):
        total = 0.0
        run = {(t.segment, t.group, t.direction) for t in schedule.order[: at + 1]}
        for s, g, d in run:
            done = (s, g, BACKWARD) in run
            here = of[s] == of[last.segment]
            if d == FORWARD and (s, g, BACKWARD) in tasks and not done and here:
                k = kept[s, schedule.groups[g].shape]
                total += k.n_bytes + k.more_bytes * (s in schedule.groups[g].remat_less)
        yield of[last.segment], total


@pytest.mark.parametrize("seed", range(20))
def test_residuals_fit_memory_at_every_task(seed):
    rng = np.random.default_rng(seed)
    plan, schedule, prices, trainable = random_case(rng, sends=True)
    plan = plan.with_scheduling(order="1f1b")
    plan, prices = second_policies(rng, plan, prices, 8.0)
    ordered = with_list_order(plan, schedule, prices, trainable)
    planned = with_memory_plan(plan, ordered, prices, trainable)
    assert planned.order == ordered.order
    assert planned.makespan_s <= ordered.makespan_s
    again = simulate_step(plan, planned, prices, trainable)
    assert planned.makespan_s == pytest.approx(again.makespan_s)
    of, limit = segment_resources(plan.layout), in_flight_limit(plan)
    largest = {}
    for k in plan.scheduling.residuals:
        largest[k.segment] = max(largest.get(k.segment, 0.0), k.n_bytes)
    most = dict.fromkeys(of.values(), 0.0)  # that the planner reserved, and what was left
    for s in plan.layout.segments:
        most[of[s.name]] += largest[s.name] * limit[s.name]
    free = {of[s.name]: plan.scheduling.free_bytes[s.submesh] for s in plan.layout.segments}
    seconds = {s.name: s.remat_less for s in plan.layout.segments}
    assert all(seconds[n] == "none" for g in planned.groups for n in g.remat_less)
    plain, counted = dict.fromkeys(most, 0.0), dict.fromkeys(most, 0.0)
    for peaks, one in ((plain, ordered), (counted, planned)):
        for r, total in held(plan, one):
            peaks[r] = max(peaks[r], total)
    assert all(counted[r] <= max(most[r] + free[r], plain[r]) + 1e-6 for r in most)
    assert peak_residual_bytes(plan, planned) == pytest.approx(counted)


@pytest.mark.parametrize("free, share", [(0.0, 0.0), (1e9, 1.0)])
def test_memory_decides_how_many_groups_keep_residuals(free, share):
    """Two segments; as many groups in flight as 1F1B allows leave what is free and no more."""
    plan = graph("b:2")
    first = replace(plan.layout.segments[0], remat="layers", remat_less="none")
    kept = tuple(ResidualBytes(n, shape, 4.0 * MIB, 8.0 * MIB * (n == "b0"))
                 for n in names(plan) for shape in SHAPES)  # fmt: skip
    plan = plan.with_layout(segments=(first, plan.layout.segments[1])).with_scheduling(
        residuals=kept, free_bytes={m.name: free * MIB for m in plan.layout.submeshes}
    )
    base = same_prices(plan, 1.0, 3.0, 3.0)
    less = {
        ProgramId("b0", s, d, True): Price(1.0 if d == FORWARD else 2.0)
        for s in SHAPES
        for d in (FORWARD, BACKWARD)
    }
    prices = Prices({**base.programs, **less})
    ordered = with_list_order(plan, batch(plan, 6), prices, names(plan))
    planned = with_memory_plan(plan, ordered, prices, names(plan))
    assert sum(g.remat_less == ("b0",) for g in planned.groups) == share * 6
    assert (planned == ordered) == (share == 0)
    for empty in (Schedule(0, ()), batch(plan, 0)):
        ordered = with_list_order(plan, empty, prices, names(plan))
        assert with_memory_plan(plan, ordered, prices, names(plan)) == ordered
