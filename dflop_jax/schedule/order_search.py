"""The order of a step's tasks that a schedule gets: list scheduling to and fro in time, then the
same again from the best answer, disturbed, for as long as there is work left."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np

from dflop_jax.records import NO_GROUP, Plan, Prices, Schedule
from dflop_jax.schedule.balance_problem import ROUNDING, Budget, Ints
from dflop_jax.simulate.list_scheduling import listed, sequenced, turned
from dflop_jax.simulate.numbered_tasks import NumberedTasks, most_kept, number_tasks, starts_of
from dflop_jax.simulate.steps import makespan_by, sends_of, task_seconds
from dflop_jax.simulate.task_graph import StepGraph, step_graph

_LISTED_PER_WORK = 16  # tasks that list scheduling places for a unit of work
# Pairs of units of tasks that change places in one start, at most. With six or one 24 small steps
# were 0.7 and 0.4% longer.
_MOST_EXCHANGES = 3

Answer = tuple[list[int], int]  # an order and its makespan in ticks
_makespan = itemgetter(1)


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
    if budget.done or budget.left < _first_work(len(schedule.order)):
        return schedule
    graph = step_graph(plan.layout, schedule.groups, trainable)
    before = [graph.place[t] for t in schedule.order]
    problem = problem_of(plan, schedule, graph, prices, before)
    after, _ = searched(problem, before, budget, seed)
    if after == before:
        return schedule
    makespan_s = makespan_by(plan, schedule, graph, prices)(after)
    if makespan_s >= schedule.makespan_s * (1 - ROUNDING):
        return schedule
    order = tuple(graph.tasks[t] for t in after)
    return replace(schedule, order=order, makespan_s=makespan_s)


def problem_of(
    plan: Plan, schedule: Schedule, graph: StepGraph, prices: Prices, order: Sequence[int]
) -> NumberedTasks:
    """The tasks of a step, at the prices of tasks that nothing slows down.

    A segment may keep as many groups as in 1F1B (`order.in_flight_limit`), or as it does in
    `order` where that is more.
    """
    seconds = task_seconds(schedule, prices)
    sent = sends_of(plan.layout, schedule, graph, prices)
    tasks = number_tasks(plan, graph, schedule.groups, seconds, sent)
    limit = tuple(map(max, tasks.limit, most_kept(tasks, order)))
    return replace(tasks, limit=limit, alike=_alike(schedule, graph))


def _alike(schedule: Schedule, graph: StepGraph) -> tuple[Ints, ...]:
    """By module, and by module and direction, the tasks of each group, segment by segment: arrays
    [groups, tasks] of two rows or more."""
    tasks: dict[tuple[str, str], dict[int, list[int]]] = {}
    for i, t in enumerate(graph.tasks):
        if t.group != NO_GROUP:
            for kind in ("", t.direction):
                by_group = tasks.setdefault((schedule.groups[t.group].module, kind), {})
                by_group.setdefault(t.group, []).append(i)
    return tuple(np.array(list(g.values())) for g in tasks.values() if len(g) > 1)


def searched(problem: NumberedTasks, order: Sequence[int], budget: Budget, seed: int) -> Answer:
    """The fastest order that was found, its tasks by their start; `order` where none is faster.

    No segment keeps more groups than its limit. The answer depends on the arguments alone.
    """
    budget.spend(_first_work(problem.n))
    bound = order_bound(problem)
    best = first = list(order), starts_of(problem, order)[1]
    if best[1] > bound and not budget.done:
        best = min([best, *_first_answers(problem, budget)], key=_makespan)
        rng = np.random.default_rng(seed)
        while best[1] > bound and not budget.done:
            answers = [*_disturbed(problem, best, budget, rng), best]
            best = min(answers, key=_makespan)  # of equals the new one, to move on
    if best[1] == first[1]:
        return first
    starts, makespan = starts_of(problem, best[0])
    return sorted(best[0], key=starts.__getitem__), makespan


def _first_work(n: int) -> float:
    """Units of work before the search of `n` tasks has its first answer."""
    return 3 * n / _LISTED_PER_WORK


def heads_of(problem: NumberedTasks) -> list[int]:
    """Ticks before which no order can start each task.

    All that a task waits for must have run; a resource that runs several of these runs them one
    after another, and what the last of them sends is on its way for the shortest of their sends.
    """
    heads, waits = [0] * problem.n, list(problem.n_waits)
    into: list[dict[int, list[tuple[int, int, int]]]] = [{} for _ in range(problem.n)]
    ready = [t for t in range(problem.n) if not waits[t]]
    for t in ready:  # which grows
        for rows in into[t].values():
            end = 0
            for head, ticks, send in sorted(rows):
                heads[t] = max(heads[t], head + ticks + send)
                end = max(end, head) + ticks
            heads[t] = max(heads[t], end + min(row[2] for row in rows))
        for reader, _, send in problem.out[t]:
            row = heads[t], problem.ticks[t], send
            into[reader].setdefault(problem.resource[t], []).append(row)
            waits[reader] -= 1
            if not waits[reader]:
                ready.append(reader)
    return heads


def order_bound(problem: NumberedTasks) -> int:
    """Ticks that no order of the tasks can beat: a resource runs its tasks one at a time, between
    the least that comes before one of them and the least that follows one."""
    bound, heads, tails = 0, heads_of(problem), heads_of(problem.mirrored)
    for r in range(problem.n_resources):
        own = [t for t in range(problem.n) if problem.resource[t] == r]
        busy = sum(problem.ticks[t] for t in own)
        ends = [min((end[t] for t in own), default=0) for end in (heads, tails)]
        bound = max(bound, busy + sum(ends), *(heads[t] + problem.ticks[t] + tails[t] for t in own))
    return bound


def _first_answers(problem: NumberedTasks, budget: Budget) -> Iterator[Answer]:
    """List scheduling, longest tail first or by the middle between earliest and latest start, with
    one queue a resource and with two."""
    longest = [-tail - ticks for tail, ticks in zip(heads_of(problem.mirrored), problem.ticks)]
    middle = [head + tail for head, tail in zip(heads_of(problem), longest)]
    for keys, alternate in ((longest, False), (middle, True), (longest, True), (middle, False)):
        if not budget.done:
            budget.spend(problem.n / _LISTED_PER_WORK)
            yield from _to_and_fro(problem, listed(problem, keys, alternate=alternate), budget)


def _disturbed(
    problem: NumberedTasks, best: Answer, budget: Budget, rng: np.random.Generator
) -> Iterator[Answer]:
    """Answers near the best: its tasks' starts, of which some are exchanged or all scatter, are the
    keys of another order, with resources that wait for nothing or that may wait."""
    exchange, may_wait = rng.integers(2, size=2)
    starts = np.array(starts_of(problem, best[0])[0])
    if exchange and problem.alike:
        for _ in range(int(rng.integers(1, _MOST_EXCHANGES + 1))):
            units = problem.alike[int(rng.integers(len(problem.alike)))]
            a, b = rng.choice(len(units), 2, replace=False)
            starts[units[a]], starts[units[b]] = starts[units[b]], starts[units[a]]
    else:
        reach = best[1] >> int(rng.integers(1, problem.n.bit_length() + 1))
        starts += rng.integers(-reach, reach + 1, problem.n)
    keys = starts.tolist()
    budget.spend(2 * problem.n / _LISTED_PER_WORK)
    if not may_wait:
        yield from _to_and_fro(problem, listed(problem, keys), budget)
    elif problem.allows(order := sequenced(problem, keys)):
        yield order, starts_of(problem, order)[1]


def _to_and_fro(problem: NumberedTasks, order: list[int], budget: Budget) -> Iterator[Answer]:
    """An order, then list scheduling back in time by its ends and forth by the starts of that, for
    as long as it gains."""
    makespan = starts_of(problem, order)[1]
    while problem.allows(order):
        yield order, makespan
        if budget.done:
            return
        order = turned(problem, turned(problem.mirrored, order))
        budget.spend(2 * problem.n / _LISTED_PER_WORK)
        before, makespan = makespan, starts_of(problem, order)[1]
        if makespan >= before:
            return
