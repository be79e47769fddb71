"""Search the order of a step's tasks: list scheduling forward and backward in time, then the same
from perturbations of the best order, until the work is spent."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np

from dflop_jax.records import NO_GROUP, Group, Plan, Prices, Schedule
from dflop_jax.schedule.balance_problem import ITEMS_PER_WORK, ROUNDING, Budget
from dflop_jax.simulate.numbered_tasks import (
    StepTasks,
    backward_list_schedule,
    list_schedule,
    number_tasks,
    peak_in_flight,
    serial_schedule,
    start_ticks,
)
from dflop_jax.simulate.steps import makespan_function, task_seconds, task_sends
from dflop_jax.simulate.task_graph import StepGraph, step_graph

# Maximum number of exchanges in one perturbation. With 6 or 1, 24 small steps are 0.7% and 0.4%
# longer.
_MAX_EXCHANGES = 3

TimedOrder = tuple[list[int], int]  # an order and its makespan in ticks
_makespan = itemgetter(1)


def with_searched_order(
    plan: Plan,
    schedule: Schedule,
    prices: Prices,
    trainable: Collection[str],
    budget: Budget,
    seed: int,
) -> Schedule:
    """Return the schedule with an order that is faster in simulation; unchanged if none is found or
    the budget is too small.

    The search assumes that tasks do not slow each other down (`prices.concurrency`). The simulator
    models this and decides between the result and the schedule's own order.
    """
    if budget.is_spent or budget.remaining < _min_work(len(schedule.order)):
        return schedule
    graph = step_graph(plan.layout, schedule.groups, trainable)
    order_before = [graph.task_index[t] for t in schedule.order]
    problem = order_problem(plan, schedule, graph, prices, order_before)
    order_after, _ = search_order(problem, order_before, budget, seed)
    if order_after == order_before:
        return schedule
    makespan_s = makespan_function(plan, schedule, graph, prices)(order_after)
    if makespan_s >= schedule.makespan_s * (1 - ROUNDING):
        return schedule
    order = tuple(graph.tasks[t] for t in order_after)
    return replace(schedule, order=order, makespan_s=makespan_s)


def order_problem(
    plan: Plan, schedule: Schedule, graph: StepGraph, prices: Prices, order: Sequence[int]
) -> StepTasks:
    """Return a step's tasks with their undisturbed times. A segment may hold as many groups as
    under 1F1B (`task_graph.in_flight_limit`), or as in `order` if that is more."""
    seconds = task_seconds(schedule, prices)
    sent = task_sends(plan.layout, schedule, graph, prices)
    tasks = number_tasks(plan, graph, schedule.groups, seconds, sent)
    limit = tuple(map(max, tasks.max_live, peak_in_flight(tasks, order)))
    return replace(tasks, max_live=limit, interchangeable=_equal_units(graph, schedule.groups))


def _equal_units(graph: StepGraph, groups: Sequence[Group]) -> tuple[np.ndarray, ...]:
    """Return arrays [units, tasks] of units with tasks of the same segments and directions. A unit
    is a group's tasks of one direction, or all tasks of the groups that feed one last group."""
    last = list(range(len(groups)))
    for i in reversed(last):
        last[i] = max((last[f] for f in groups[i].feeds), default=i)
    by_group: dict[tuple[int, str], list[int]] = {}
    by_last: dict[int, list[int]] = {}
    for i, t in enumerate(graph.tasks):
        if t.group != NO_GROUP:
            by_group.setdefault((t.group, t.direction), []).append(i)
            by_last.setdefault(last[t.group], []).append(i)
    units_of: dict[tuple[tuple[str, str], ...], dict[tuple[int, ...], None]] = {}
    for unit in (*by_last.values(), *by_group.values()):
        kind = tuple((graph.tasks[i].segment, graph.tasks[i].direction) for i in unit)
        units_of.setdefault(kind, {})[tuple(unit)] = None
    return tuple(np.array([*units]) for units in units_of.values() if len(units) > 1)


def search_order(problem: StepTasks, order: Sequence[int], budget: Budget, seed: int) -> TimedOrder:
    """Return the fastest order found within the limits on live groups, sorted by task start;
    `order` if none is faster."""
    budget.spend(_min_work(problem.n_tasks))
    bound_ticks = order_bound(problem)
    best_order = initial = list(order), start_ticks(problem, order)[1]
    if best_order[1] > bound_ticks and not budget.is_spent:
        best_order = min([best_order, *_initial_orders(problem, budget)], key=_makespan)
        rng = np.random.default_rng(seed)
        while best_order[1] > bound_ticks and not budget.is_spent:
            candidates = [*_perturbed_orders(problem, best_order, budget, rng), best_order]
            best_order = min(candidates, key=_makespan)  # a new order wins ties, to move on
    if best_order[1] == initial[1]:
        return initial
    starts, makespan = start_ticks(problem, best_order[0])
    return sorted(best_order[0], key=starts.__getitem__), makespan


def _min_work(n: int) -> float:
    """Return the units of work until the search of `n` tasks has its first order."""
    return 3 * n / ITEMS_PER_WORK


def _initial_orders(problem: StepTasks, budget: Budget) -> Iterator[TimedOrder]:
    """Yield list schedules by longest tail, by longest head backward in time, and by the mean of
    earliest and latest start with two queues per resource."""
    heads, tails = earliest_starts(problem), earliest_starts(problem.mirrored)
    by_tail = [-tail - ticks for tail, ticks in zip(tails, problem.ticks)]
    by_head = [-head - ticks for head, ticks in zip(heads, problem.ticks)]
    by_middle = [head + key for head, key in zip(heads, by_tail)]
    for make_order in (
        lambda: list_schedule(problem, by_tail),
        lambda: list_schedule(problem.mirrored, by_head)[::-1],
        lambda: list_schedule(problem, by_middle, alternate=True),
    ):
        if not budget.is_spent:
            budget.spend(problem.n_tasks / ITEMS_PER_WORK)
            yield from _forward_backward(problem, make_order(), budget)


def _perturbed_orders(
    problem: StepTasks, best_order: TimedOrder, budget: Budget, rng: np.random.Generator
) -> Iterator[TimedOrder]:
    """Yield orders near the best one: some of its starts are exchanged, or all are perturbed. The
    starts are the keys of a list schedule, or of a serial schedule in which resources may wait."""
    exchange, may_wait = rng.integers(2, size=2)
    starts = np.array(start_ticks(problem, best_order[0])[0])
    if exchange and problem.interchangeable:
        for _ in range(int(rng.integers(1, _MAX_EXCHANGES + 1))):
            units = problem.interchangeable[int(rng.integers(len(problem.interchangeable)))]
            a, b = rng.choice(len(units), 2, replace=False)
            starts[units[a]], starts[units[b]] = starts[units[b]], starts[units[a]]
    else:
        reach = best_order[1] >> int(rng.integers(1, problem.n_tasks.bit_length() + 1))
        starts += rng.integers(-reach, reach + 1, problem.n_tasks)
    keys = starts.tolist()
    budget.spend(2 * problem.n_tasks / ITEMS_PER_WORK)
    if not may_wait:
        yield from _forward_backward(problem, list_schedule(problem, keys), budget)
    elif problem.is_within_limits(order := serial_schedule(problem, keys)):
        yield order, start_ticks(problem, order)[1]


def _forward_backward(problem: StepTasks, order: list[int], budget: Budget) -> Iterator[TimedOrder]:
    """Yield an order and its forward-backward improvements (list scheduling backward in time by its
    ends, then forward by the resulting starts) while the makespan decreases. Tasks of an order made
    backward in time run as late as possible, so that resources may wait for longer tasks."""
    makespan = start_ticks(problem, order)[1]
    while problem.is_within_limits(order):
        yield order, makespan
        if budget.is_spent:
            return
        mirrored = backward_list_schedule(problem.mirrored, order)
        backward = mirrored[::-1]
        if problem.is_within_limits(backward):
            yield backward, start_ticks(problem, backward)[1]
        order = backward_list_schedule(problem, mirrored)
        budget.spend(2 * problem.n_tasks / ITEMS_PER_WORK)
        previous, makespan = makespan, start_ticks(problem, order)[1]
        if makespan >= previous:
            return


def earliest_starts(problem: StepTasks) -> list[int]:
    """Return a lower bound on each task's start in any order, in ticks: a resource runs the task's
    inputs one after another, and then needs at least the shortest of their sends."""
    start_ticks, n_pending = [0] * problem.n_tasks, list(problem.n_inputs)
    inputs: list[dict[int, list[tuple[int, int, int]]]] = [{} for _ in range(problem.n_tasks)]
    ready_tasks = [t for t in range(problem.n_tasks) if not n_pending[t]]
    for t in ready_tasks:  # the list grows in the loop
        for rows in inputs[t].values():
            end = 0
            for head, ticks, send in sorted(rows):
                start_ticks[t] = max(start_ticks[t], head + ticks + send)
                end = max(end, head) + ticks
            start_ticks[t] = max(start_ticks[t], end + min(row[2] for row in rows))
        for reader, _, send in problem.successors[t]:
            row = start_ticks[t], problem.ticks[t], send
            inputs[reader].setdefault(problem.resource[t], []).append(row)
            n_pending[reader] -= 1
            if not n_pending[reader]:
                ready_tasks.append(reader)
    return start_ticks


def order_bound(problem: StepTasks) -> int:
    """Return a lower bound on the makespan of any order, in ticks: a resource runs its tasks one at
    a time, after their minimum head and before their minimum tail."""
    bound, heads, tails = 0, earliest_starts(problem), earliest_starts(problem.mirrored)
    for r in range(problem.n_resources):
        own_tasks = [t for t in range(problem.n_tasks) if problem.resource[t] == r]
        busy = sum(problem.ticks[t] for t in own_tasks)
        ends = [min((end[t] for t in own_tasks), default=0) for end in (heads, tails)]
        through = [heads[t] + problem.ticks[t] + tails[t] for t in own_tasks]
        bound = max(bound, busy + sum(ends), *through)
    return bound
