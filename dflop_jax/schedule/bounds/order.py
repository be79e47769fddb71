"""A lower bound on the makespan of given tasks in any order."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from dflop_jax.tasks.numbered import NumberedTasks


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


def tails_of(problem: NumberedTasks) -> list[int]:
    """Ticks that pass at least after the end of each task."""
    return heads_of(problem.mirrored)


def order_bound(problem: NumberedTasks) -> int:
    """Ticks that no order of the tasks can beat.

    A resource runs its tasks one at a time, none before its head, and its tail follows each. The
    least makespan of one resource where tasks may be interrupted is known (Jackson's preemptive
    schedule); the bound is the largest of all resources.
    """
    heads, tails = heads_of(problem), tails_of(problem)
    tasks: list[list[int]] = [[] for _ in range(problem.n_resources)]
    for t in range(problem.n):
        tasks[problem.resource[t]].append(t)
    return max((_alone(problem.ticks, some, heads, tails) for some in tasks), default=0)


def _alone(
    ticks: Sequence[int], tasks: Sequence[int], heads: Sequence[int], tails: Sequence[int]
) -> int:
    """Least makespan of one resource's tasks where the one of longest tail interrupts others."""
    waiting: list[tuple[int, int]] = []
    left = {t: ticks[t] for t in tasks}
    coming = sorted(tasks, key=lambda t: (-heads[t], t))
    now = makespan = 0
    while coming or waiting:
        if not waiting:
            now = max(now, heads[coming[-1]])
        while coming and heads[coming[-1]] <= now:
            t = coming.pop()
            heapq.heappush(waiting, (-tails[t], t))
        t = waiting[0][1]
        if coming and now + left[t] > heads[coming[-1]]:
            left[t] -= heads[coming[-1]] - now
            now = heads[coming[-1]]
        else:
            now += left[t]
            makespan = max(makespan, now + tails[t])
            heapq.heappop(waiting)
    return makespan
