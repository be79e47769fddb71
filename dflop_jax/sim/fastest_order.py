"""The better of two list schedules, by the simulator's makespan alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from dflop_jax.records import Plan, Prices, Schedule
from dflop_jax.sim.pipeline import sent_over, simulate_order, task_seconds
from dflop_jax.tasks.graph import StepGraph, resources, step_graph
from dflop_jax.tasks.numbered import run_in_order, sent_by
from dflop_jax.tasks.order import both_orders

_ROUNDING = 1e-9  # makespans that differ by less are the same


def with_order(
    plan: Plan, schedule: Schedule, prices: Prices, trainable: Collection[str]
) -> Schedule:
    """The schedule with the order of tasks that is fastest in simulation, and its makespan.

    List scheduling by textbook durations is compared with list scheduling by the prices, which does
    not always beat it: the first choice of a greedy rule may be wrong with the right numbers. The
    second is taken where it is faster by more than rounding.
    """
    graph = step_graph(plan.layout, schedule.groups, trainable)
    seconds = task_seconds(plan.layout, schedule, prices)
    makespan_s = makespan_by(plan, schedule, graph, prices)
    order, priced = both_orders(plan, graph, schedule.groups, seconds)
    best_s = makespan_s(order)
    if priced != order and (other_s := makespan_s(priced)) < best_s * (1 - _ROUNDING):
        order, best_s = priced, other_s
    return replace(schedule, order=tuple(graph.tasks[i] for i in order), makespan_s=best_s)


def makespan_by(
    plan: Plan, schedule: Schedule, graph: StepGraph, prices: Prices
) -> Callable[[Sequence[int]], float]:
    """What the simulator says of orders, given as numbers of the graph's tasks. Where nothing slows
    tasks down it is read off the ends of what each waits for, without a trace."""
    layout, of = plan.layout, resources(plan.layout)
    devices = dict.fromkeys(of.values(), 0)
    for m in layout.submeshes:
        devices[of[m.name]] = max(devices[of[m.name]], m.n_devices)
    if sum(devices.values()) > prices.concurrency:

        def simulated(order: Sequence[int]) -> float:
            tasks = [graph.tasks[i] for i in order]
            return simulate_order(layout, schedule, graph, tasks, prices).makespan_s

        return simulated
    ids = sorted(devices)
    submesh = {s.name: s.submesh for s in layout.segments}
    resource = [ids.index(of[submesh[t.segment]]) for t in graph.tasks]
    task_s = list(map(task_seconds(layout, schedule, prices), graph.tasks))
    out, n_links = sent_by(graph, sent_over(layout, schedule, graph, prices))

    def read_off(order: Sequence[int]) -> float:
        return run_in_order(order, resource, task_s, out, [0.0] * len(ids), [0.0] * n_links)[1]

    return read_off
