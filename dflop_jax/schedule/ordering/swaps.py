"""Local search on sequences: tasks that follow each other on a critical path change places.

The move that promises most is made even where it is for the worse, and not undone for a while
(tabu search, as for job shops).
"""

from __future__ import annotations

from collections.abc import Sequence

from dflop_jax.schedule.solver.budget import Budget
from dflop_jax.tasks.numbered import NumberedTasks, starts_of

_TASKS_PER_WORK = 30  # tasks of a step in which a swap costs a unit of work
# Moves for which one is not undone, and up to as many more; twice as many lead further away from an
# order before its neighbours are looked at again. Steps took as long with 16, 0.01% longer with 4.
_TABU_MOVES = 8

Move = tuple[int, int, int]  # estimated makespan, a task, the next one of its resource


def with_swaps(
    problem: NumberedTasks, order: Sequence[int], budget: Budget, bound: int, patience: int
) -> tuple[list[int], int]:
    """(order, makespan): the best before `patience` moves in a row brought nothing better."""
    now = list(order)
    starts, makespan = starts_of(problem, now)
    best, best_makespan = now, makespan
    until: dict[tuple[int, int], int] = {}  # the turn to which a move is forbidden
    turn, last_gain = 0, 0
    while turn - last_gain < patience and best_makespan > bound and not budget.done:
        budget.spend(problem.n / _TASKS_PER_WORK)
        turn += 1
        moves = _moves(problem, now, starts, makespan)
        if not moves:
            break
        free = [m for m in moves if until.get(m[1:], 0) < turn or m[0] < best_makespan]
        _, u, v = min(free) if free else min(moves, key=lambda m: (until[m[1:]], m))
        after = swapped(problem, now, u, v)
        if after is None:
            until[u, v] = turn + patience  # not again, unless something better comes first
            continue
        until[v, u] = turn + _TABU_MOVES + (7 * turn + u + v) % _TABU_MOVES
        now = after
        starts, makespan = starts_of(problem, now)
        if makespan < best_makespan:
            best, best_makespan, last_gain = now, makespan, turn
    return best, best_makespan


def _moves(
    problem: NumberedTasks, order: Sequence[int], starts: Sequence[int], makespan: int
) -> list[Move]:
    """All pairs that follow each other on a critical path and may change places."""
    ticks, keeps, segment, out = problem.ticks, problem.keeps, problem.segment, problem.out
    before, after, n_kept = _neighbours(problem, order)
    inputs, rest, tail = _times(problem, order, starts, after)
    moves = []
    for u in order:
        v = after[u]
        if v < 0 or starts[v] + tail[v] < makespan or starts[v] > starts[u] + ticks[u]:
            continue
        full = keeps[v] > 0 > keeps[u] and segment[u] == segment[v]
        if full and n_kept[v] + 1 > problem.limit[segment[v]]:
            continue
        if any(reader == v for reader, _, _ in out[u]):
            continue
        free = starts[before[u]] + ticks[before[u]] if before[u] >= 0 else 0
        start_v = max(free, inputs[v])
        start_u = max(start_v + ticks[v], inputs[u])
        tail_u = ticks[u] + max(tail[after[v]] if after[v] >= 0 else 0, rest[u])
        tail_v = ticks[v] + max(tail_u, rest[v])
        moves.append((max(start_v + tail_v, start_u + tail_u), u, v))
    return moves


def _neighbours(
    problem: NumberedTasks, order: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """By task: the one before and the one after it on its resource (-1: none), and how many groups
    its segment keeps with it."""
    before, after, n_kept = [-1] * problem.n, [-1] * problem.n, [0] * problem.n
    last, now = [-1] * problem.n_resources, [0] * len(problem.limit)
    for t in order:
        r, s = problem.resource[t], problem.segment[t]
        before[t] = last[r]
        if last[r] >= 0:
            after[last[r]] = t
        last[r] = t
        now[s] += problem.keeps[t]
        n_kept[t] = now[s]
    return before, after, n_kept


def _times(
    problem: NumberedTasks, order: Sequence[int], starts: Sequence[int], after: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """By task: when its inputs are there, how much follows its end by those that wait for it, and
    how much follows its start at all; links are taken to be free."""
    ticks, out = problem.ticks, problem.out
    inputs, rest, tail = [0] * problem.n, [0] * problem.n, [0] * problem.n
    for t in order:
        end = starts[t] + ticks[t]
        for reader, _, send in out[t]:
            if end + send > inputs[reader]:
                inputs[reader] = end + send
    for t in reversed(order):
        longest = 0
        for reader, _, send in out[t]:
            if send + tail[reader] > longest:
                longest = send + tail[reader]
        rest[t] = longest
        if after[t] >= 0 and tail[after[t]] > longest:
            longest = tail[after[t]]
        tail[t] = longest + ticks[t]
    return inputs, rest, tail


def swapped(problem: NumberedTasks, order: Sequence[int], u: int, v: int) -> list[int] | None:
    """The order with `v` before `u`, which is the one before it on its resource, and with what `v`
    waits for before both; None where that is `u`."""
    first, last = order.index(u), order.index(v)
    needed, busy = {v}, set[int]()
    earlier, later = [v], []
    for t in reversed(order[first:last]):
        r = problem.resource[t]
        if r in busy or any(reader in needed for reader, _, _ in problem.out[t]):
            if t == u:
                return None
            needed.add(t)
            busy.add(r)
            earlier.append(t)
        else:
            later.append(t)
    return [*order[:first], *reversed(earlier), *reversed(later), *order[last + 1 :]]
