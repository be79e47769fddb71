"""The order of a step's tasks that a schedule gets."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from dflop_jax.records import Plan, Prices, Schedule
from dflop_jax.schedule.ordering.problem import problem_of
from dflop_jax.schedule.ordering.search import first_work, searched
from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.schedule.solver.problem import ROUNDING
from dflop_jax.sim.pipeline import makespan_by
from dflop_jax.tasks.graph import step_graph


def with_searched_order(
    plan: Plan,
    schedule: Schedule,
    prices: Prices,
    trainable: Collection[str],
    budget: Budget,
    seed: int,
) -> Schedule:
    """The schedule with an order that is faster in simulation than its own, or as it is: where
    none is found, or the budget is too small to look for one.

    Tasks that slow each other down (`prices.concurrency`) are searched as if they did not; the
    simulator, which knows, decides between the answer and the schedule's own order.
    """
    if budget.done or budget.left < first_work(len(schedule.order)):
        return schedule
    graph = step_graph(plan.layout, schedule.groups, trainable)
    problem = problem_of(plan, schedule, graph, prices, schedule.order)
    best = searched(problem, [graph.place[t] for t in schedule.order], budget, seed)
    order = tuple(graph.tasks[t] for t in best.order)
    if order == schedule.order:
        return schedule
    makespan_s = makespan_by(plan, schedule, graph, prices)(best.order)
    if makespan_s >= schedule.makespan_s * (1 - ROUNDING):
        return schedule
    return replace(schedule, order=order, makespan_s=makespan_s)
