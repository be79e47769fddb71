"""The better of two list schedules, by the simulator's makespan alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from dflop_jax.records import Plan, Prices, Schedule
from dflop_jax.sim.pipeline import sends_of, simulate_order, task_seconds
from dflop_jax.tasks.graph import StepGraph, resources, step_graph
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
    resource, task_s, out = _alone(plan, schedule, graph, prices)

    def read_off(order: Sequence[int]) -> float:
        start_s = [0.0] * len(order)  # until a task's turn comes: when its inputs are there
        free_s = dict.fromkeys(devices, 0.0)
        link_free_s: dict[tuple[str, str], float] = {}
        last_s = 0.0
        for i in order:
            end_s = max(free_s[resource[i]], start_s[i]) + task_s[i]
            free_s[resource[i]] = end_s
            last_s = max(last_s, end_s)
            for reader, link, send_s in out[i]:
                arrives_s = end_s
                if link is not None:
                    arrives_s = max(link_free_s.get(link, 0.0), end_s) + send_s
                    link_free_s[link] = arrives_s
                    last_s = max(last_s, arrives_s)
                if arrives_s > start_s[reader]:
                    start_s[reader] = arrives_s
        return last_s

    return read_off


_Out = list[tuple[int, tuple[str, str] | None, float]]  # (reader, link, seconds) of what is sent


def _alone(
    plan: Plan, schedule: Schedule, graph: StepGraph, prices: Prices
) -> tuple[list[int], list[float], list[_Out]]:
    """Of every task its resource, its seconds and what it sends."""
    layout, of = plan.layout, resources(plan.layout)
    submesh = {s.name: s.submesh for s in layout.segments}
    seconds = task_seconds(layout, schedule, prices)
    out: list[_Out] = [[(f, None, 0.0) for f in followers] for followers in graph.followers]
    for task, sends in sends_of(layout, schedule, graph, prices).items():
        place = graph.place[task]
        over = [
            (graph.place[s.reader], (submesh[task.segment], submesh[s.reader.segment]), s.seconds)
            for s in sends
        ]
        reached = {reader for reader, _, _ in over}
        out[place] = [*over, *(o for o in out[place] if o[0] not in reached)]
    resource = [of[submesh[t.segment]] for t in graph.tasks]
    return resource, [seconds(t) for t in graph.tasks], out
