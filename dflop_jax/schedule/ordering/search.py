"""The search of an order: list scheduling to and fro in time, then swaps on critical paths, then
both again from the best answer, disturbed, for as long as there is work left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dflop_jax.schedule.ordering.bound import order_bound, tails_of
from dflop_jax.schedule.ordering.listing import listed, turned
from dflop_jax.schedule.ordering.problem import Problem, starts_of
from dflop_jax.schedule.ordering.swaps import swapped, with_swaps
from dflop_jax.schedule.solver.budget import Budget

LISTED_PER_WORK = 16  # tasks of one list scheduling
_PATIENCE = 30  # moves of a local search without a better answer
_TURNS = 3  # of list scheduling to and fro, at most
_MOST_JOLTS = 5  # random swaps, or units whose keys are shifted
_SHIFT = 10  # a key is shifted by up to the makespan over this

Answer = tuple[list[int], int]  # an order and its makespan in ticks


@dataclass(frozen=True)
class Found:
    """An order of task numbers, its makespan, and what no order can beat, in ticks."""

    order: tuple[int, ...]
    makespan: int
    bound: int


def searched(problem: Problem, order: Sequence[int], budget: Budget, seed: int) -> Found:
    """The fastest order that was found, its tasks by their start; `order` where none is faster.

    No segment keeps more groups than its limit. The answer depends on the arguments alone.
    """
    bound = order_bound(problem)
    best = first = list(order), starts_of(problem, order)[1]
    budget.spend(3 * problem.n / LISTED_PER_WORK)
    if best[1] > bound and not budget.done:
        now = best
        for answer in _first_answers(problem, budget):
            now = min(now, answer, key=lambda a: a[1])
        best = now = min(now, _swapped(problem, now[0], budget, bound), key=lambda a: a[1])
        rng = np.random.default_rng(seed)
        while best[1] > bound and not budget.done:
            for answer in _disturbed(problem, now, budget, bound, rng):
                now = answer if answer[1] <= now[1] else now
            best = min(best, now, key=lambda a: a[1])
    if best[1] == first[1]:
        return Found(tuple(order), first[1], min(bound, first[1]))
    starts, makespan = starts_of(problem, best[0])
    return Found(tuple(sorted(best[0], key=starts.__getitem__)), makespan, min(bound, makespan))


def _first_answers(problem: Problem, budget: Budget) -> Iterator[Answer]:
    """List scheduling, longest tail first, with one queue a resource and with two."""
    keys = [-tail - ticks for tail, ticks in zip(tails_of(problem), problem.ticks)]
    for alternate in (False, True):
        budget.spend(problem.n / LISTED_PER_WORK)
        yield from _to_and_fro(problem, listed(problem, keys, alternate=alternate), budget)


def _disturbed(
    problem: Problem, now: Answer, budget: Budget, bound: int, rng: np.random.Generator
) -> Iterator[Answer]:
    """Answers that begin with the present one: random neighbours swapped, or the starts of some
    units shifted, which are the keys of a list scheduling."""
    kind = int(rng.integers(3))
    if kind == 0:
        order = _jolted(problem, now[0], rng)
        if problem.allows(order):
            yield _swapped(problem, order, budget, bound)
        budget.spend(1)
        return
    keys, reach = np.array(starts_of(problem, now[0])[0]), now[1] // _SHIFT
    unit = np.array(problem.unit)
    for _ in range(int(rng.integers(1, _MOST_JOLTS))):
        keys[unit == rng.integers(unit.max() + 1)] += rng.integers(-reach, reach + 1)
    budget.spend(2 * problem.n / LISTED_PER_WORK)
    answers = list(_to_and_fro(problem, listed(problem, keys.tolist()), budget))
    yield from answers
    if kind == 2 and answers:
        yield _swapped(problem, answers[-1][0], budget, bound)


def _to_and_fro(problem: Problem, order: list[int], budget: Budget) -> Iterator[Answer]:
    """An order, then list scheduling back in time by its ends and forth by the starts of that, for
    as long as it gains."""
    makespan = starts_of(problem, order)[1]
    for turn in range(_TURNS + 1):
        if not problem.allows(order):
            return
        yield order, makespan
        if turn == _TURNS or budget.done:
            return
        order = turned(problem, turned(problem.mirrored, order))
        budget.spend(2 * problem.n / LISTED_PER_WORK)
        before, makespan = makespan, starts_of(problem, order)[1]
        if makespan >= before:
            return


def _swapped(problem: Problem, order: Sequence[int], budget: Budget, bound: int) -> Answer:
    return with_swaps(problem, order, budget, bound, _PATIENCE)


def _jolted(problem: Problem, order: list[int], rng: np.random.Generator) -> list[int]:
    """The order with some random neighbours on their resources swapped."""
    for _ in range(int(rng.integers(1, _MOST_JOLTS + 1))):
        place = int(rng.integers(problem.n))
        u = order[place]
        same = (t for t in order[place + 1 :] if problem.resource[t] == problem.resource[u])
        v = next(same, None)
        if v is not None:
            order = swapped(problem, order, u, v) or order
    return order
