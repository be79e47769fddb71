"""Groups that keep more: against every choice, and against memory counted task by task."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from dflop_jax.records import BACKWARD, FORWARD, Price, Prices, ProgramId, ResidualBytes, Schedule
from dflop_jax.schedule.balance_problem import Budget
from dflop_jax.schedule.memory_plan import (
    DeviceMemory,
    ResidualItem,
    choose_greedily,
    choose_items,
    peak_residual_bytes,
    with_memory_plan,
)
from dflop_jax.simulate.steps import simulate_step, with_list_order
from dflop_jax.simulate.task_graph import in_flight_limit, submesh_resources
from tests.simulate.cases import SHAPES, batch, graph, names, random_case, same_prices

MIB = 2.0**20


def random_device(rng, n):
    """Items that are held at some of six moments, in whole MiB."""
    room = tuple(float(x) * MIB for x in rng.integers(0, 12, 6))
    items = []
    for i in range(n):
        first, stop = sorted(int(x) for x in rng.choice(7, 2, replace=False))
        items.append(
            ResidualItem(
                "s", i, float(rng.exponential()), float(rng.integers(0, 6)) * MIB, first, stop
            )
        )
    return DeviceMemory(tuple(items), room)


def most_saved(device):
    """Over every choice."""
    n = len(device.items)
    every = (c for k in range(n + 1) for c in combinations(range(n), k))
    return max((device.saved_s(c) for c in every if fits(device, c)), default=0.0)


def fits(device, choice):
    return all(
        sum(device.items[i].extra_bytes for i in choice
            if device.items[i].first <= t < device.items[i].stop) <= room
        for t, room in enumerate(device.free_bytes_at)
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_choose_items_is_optimal(seed):
    rng = np.random.default_rng(seed)
    device = random_device(rng, int(rng.integers(0, 10)))
    choice, best_s = choose_items(device, Budget(1e6)), most_saved(device)
    assert fits(device, choice)
    assert device.saved_s(choice) >= best_s * (1 - 1e-3)
    first = choose_greedily(device)
    assert fits(device, first)
    assert choose_items(device, Budget(0)) == first
    assert choose_items(device, Budget(1e6)) == choice


def test_milp_beats_the_greedy_choice():
    found = [random_device(np.random.default_rng(seed), 9) for seed in range(60)]
    gains = [d.saved_s(choose_items(d, Budget(1e6))) / max(d.saved_s(choose_greedily(d)), 1e-9)
             for d in found]  # fmt: skip
    assert max(gains) > 1.05


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


def held(plan, schedule, less):
    """Bytes of each resource after every task of its that opens a group, counted anew each time."""
    own = {(k.segment, k.shape): k.n_bytes for k in plan.scheduling.residuals}
    more = {(k.segment, k.shape): k.more_bytes for k in plan.scheduling.residuals}
    of, where = submesh_resources(plan.layout), {s.name: s.submesh for s in plan.layout.segments}
    tasks = {(t.segment, t.group, t.direction) for t in schedule.order}
    for at, last in enumerate(schedule.order):
        total = 0.0
        for s, g, d in {(t.segment, t.group, t.direction) for t in schedule.order[: at + 1]}:
            done = any(
                (t.segment, t.group, t.direction) == (s, g, BACKWARD)
                for t in schedule.order[: at + 1]
            )
            here = of[where[s]] == of[where[last.segment]]
            if d == FORWARD and (s, g, BACKWARD) in tasks and not done and here:
                shape = schedule.groups[g].shape
                total += own[s, shape] + (more[s, shape] if less(s, g) else 0.0)
        yield of[where[last.segment]], total


@pytest.mark.parametrize("seed", range(40))
def test_residuals_fit_memory_at_every_task(seed):
    rng = np.random.default_rng(seed)
    plan, schedule, prices, trainable = random_case(rng, sends=True)
    plan = plan.with_scheduling(order="1f1b")
    plan, prices = second_policies(rng, plan, prices, 8.0)
    ordered = with_list_order(plan, schedule, prices, trainable)
    planned = with_memory_plan(plan, ordered, prices, trainable, Budget(1e6))
    assert planned.order == ordered.order
    assert planned.makespan_s <= ordered.makespan_s
    again = simulate_step(plan, planned, prices, trainable)
    assert planned.makespan_s == pytest.approx(again.makespan_s)
    of, limit = submesh_resources(plan.layout), in_flight_limit(plan)
    largest = {
        k.segment: k.n_bytes for k in sorted(plan.scheduling.residuals, key=lambda k: k.n_bytes)
    }
    most = dict.fromkeys(of.values(), 0.0)  # that the planner reserved, and what was left
    for s in plan.layout.segments:
        most[of[s.submesh]] += largest[s.name] * limit[s.name]
    free = {of[m]: b for m, b in plan.scheduling.free_bytes.items()}
    seconds = {s.name: s.remat_less for s in plan.layout.segments}
    for g in planned.groups:
        assert all(seconds[n] == "none" for n in g.remat_less)
    plain = {}
    for r, total in held(plan, ordered, lambda s, g: False):
        plain[r] = max(plain.get(r, 0.0), total)
    for r, total in held(plan, planned, lambda s, g: s in planned.groups[g].remat_less):
        assert total <= max(most[r] + free[r], plain[r]) + 1e-6
    counted = dict.fromkeys(of.values(), 0.0)
    for r, total in held(plan, planned, lambda s, g: s in planned.groups[g].remat_less):
        counted[r] = max(counted[r], total)
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
    planned = with_memory_plan(plan, ordered, prices, names(plan), Budget(1e6))
    assert sum(g.remat_less == ("b0",) for g in planned.groups) == share * 6
    assert (planned == ordered) == (share == 0)
    for empty in (Schedule(0, ()), batch(plan, 0)):
        ordered = with_list_order(plan, empty, prices, names(plan))
        assert with_memory_plan(plan, ordered, prices, names(plan), Budget(9)) == ordered
