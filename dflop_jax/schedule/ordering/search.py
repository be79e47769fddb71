"""The search of an order: list scheduling to and fro in time, then swaps on critical paths, then
both again from the best answer, disturbed, for as long as there is work left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dflop_jax.schedule.bounds.order import heads_of, order_bound, tails_of
from dflop_jax.schedule.ordering.swaps import with_swaps
from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.tasks.listing import listed, sequenced, turned
from dflop_jax.tasks.numbered import NumberedTasks, starts_of

_LISTED_PER_WORK = 16  # tasks that list scheduling places for a unit of work
# Swaps without a better order, after which another start is tried. With twice as many, 24 small
# steps were 0.02% shorter on average, with half as many 0.01% longer.
_PATIENCE = 10
# Pairs of units of tasks that change places in one start, at most. With six or one the same steps
# were 0.7 and 0.4% longer.
_MOST_EXCHANGES = 3

Answer = tuple[list[int], int]  # an order and its makespan in ticks


@dataclass(frozen=True)
class SearchedOrder:
    """An order of task numbers, its makespan, and what no order can beat, in ticks."""

    order: tuple[int, ...]
    makespan: int
    bound: int


def searched(
    problem: NumberedTasks, order: Sequence[int], budget: Budget, seed: int
) -> SearchedOrder:
    """The fastest order that was found, its tasks by their start; `order` where none is faster.

    No segment keeps more groups than its limit. The answer depends on the arguments alone.
    """
    budget.spend(first_work(problem.n))
    bound = order_bound(problem)
    best = first = list(order), starts_of(problem, order)[1]
    if best[1] > bound and not budget.done:
        answers = [best, *_first_answers(problem, budget)]
        answers.append(_swapped(problem, min(answers, key=_makespan)[0], budget, bound))
        best = min(answers, key=_makespan)
        rng = np.random.default_rng(seed)
        while best[1] > bound and not budget.done:
            answers = [*_disturbed(problem, best, budget, bound, rng), best]
            best = min(answers, key=_makespan)  # of equals the new one, to move on
    if best[1] == first[1]:
        return SearchedOrder(tuple(order), first[1], min(bound, first[1]))
    starts, makespan = starts_of(problem, best[0])
    return SearchedOrder(
        tuple(sorted(best[0], key=starts.__getitem__)), makespan, min(bound, makespan)
    )


def first_work(n: int) -> float:
    """Units of work before the search of `n` tasks has its first answer."""
    return 3 * n / _LISTED_PER_WORK


def _makespan(answer: Answer) -> int:
    return answer[1]


def _first_answers(problem: NumberedTasks, budget: Budget) -> Iterator[Answer]:
    """List scheduling, longest tail first or by the middle between earliest and latest start, with
    one queue a resource and with two."""
    tails = [tail + ticks for tail, ticks in zip(tails_of(problem), problem.ticks)]
    longest = [-tail for tail in tails]
    middle = [head - tail for head, tail in zip(heads_of(problem), tails)]
    for keys, alternate in ((longest, False), (middle, True), (longest, True), (middle, False)):
        if not budget.done:
            budget.spend(problem.n / _LISTED_PER_WORK)
            yield from _to_and_fro(problem, listed(problem, keys, alternate=alternate), budget)


def _disturbed(
    problem: NumberedTasks, best: Answer, budget: Budget, bound: int, rng: np.random.Generator
) -> Iterator[Answer]:
    """Answers near the best: its tasks' starts, of which some are exchanged or all scatter, are the
    keys of another order, with resources that wait for nothing or that may wait."""
    exchange, may_wait, swap = rng.integers(2, size=3)
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
    if may_wait:
        order = sequenced(problem, keys)
        answers = [(order, starts_of(problem, order)[1])] * problem.allows(order)
    else:
        answers = list(_to_and_fro(problem, listed(problem, keys), budget))
    yield from answers
    if swap and answers:
        yield _swapped(problem, min(answers, key=_makespan)[0], budget, bound)


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


def _swapped(problem: NumberedTasks, order: Sequence[int], budget: Budget, bound: int) -> Answer:
    return with_swaps(problem, order, budget, bound, _PATIENCE)
