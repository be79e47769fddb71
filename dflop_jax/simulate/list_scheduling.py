"""Orders by keys, within what memory allows.

List scheduling: a free resource takes the ready task of least key. Or, whatever the time: of all
tasks that could come next the one of least key does, for which its resource may have to wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from dflop_jax.simulate.numbered_tasks import NumberedTasks, starts_of


def listed(problem: NumberedTasks, keys: Sequence[int], *, alternate: bool = False) -> list[int]:
    """The order in which tasks start.

    Where every segment that has something to run is full, and nothing runs, a limit is passed.

    Args:
      alternate: forward and backward tasks queue apart, and a resource at which both wait takes the
        direction that it did not take last (the dual-queue rule).
    """
    ticks, resource, out = problem.ticks, problem.resource, problem.out
    queues = _Queues(problem, keys, alternate)
    waits, arrived = list(problem.n_waits), [0] * problem.n
    link_free = [0] * problem.n_links
    idle = [True] * problem.n_resources
    order: list[int] = []
    # What comes: inputs of a task, or the end (-1 - resource) of what a resource runs.
    events = [(0, t) for t in range(problem.n) if not waits[t]]
    now = 0
    while len(order) < problem.n:
        full = not events
        touched = set(range(problem.n_resources)) if full else set()
        if events:
            now = events[0][0]
        while events and events[0][0] <= now:
            code = heapq.heappop(events)[1]
            if code < 0:
                idle[-1 - code] = True
                touched.add(-1 - code)
            else:
                queues.add(code)
                touched.add(resource[code])
        for r in sorted(touched):
            if not idle[r] or (t := queues.take(r, full)) is None:
                continue
            order.append(t)
            idle[r], full = False, False
            end = now + ticks[t]
            heapq.heappush(events, (end, -1 - r))
            for reader, link, send in out[t]:
                arrives = end
                if link >= 0:
                    if link_free[link] > end:
                        arrives = link_free[link]
                    link_free[link] = arrives = arrives + send
                if arrives > arrived[reader]:
                    arrived[reader] = arrives
                waits[reader] -= 1
                if not waits[reader]:
                    heapq.heappush(events, (arrived[reader], reader))
    return order


class _Queues:
    """Ready tasks: of every segment those that open a group, of every resource all others."""

    def __init__(self, problem: NumberedTasks, keys: Sequence[int], alternate: bool):
        self._problem, self._keys, self._alternate = problem, keys, alternate
        self._kept = [0] * len(problem.limit)
        self._opens: list[list[tuple[int, int]]] = [[] for _ in problem.limit]
        self._others: list[list[tuple[int, int]]] = [[] for _ in range(problem.n_resources)]
        self._opened_last = [False] * problem.n_resources
        where = dict.fromkeys(
            (problem.resource[t], problem.segment[t])
            for t in range(problem.n)
            if problem.keeps[t] > 0
        )
        self._segments = [[s for r, s in where if r == k] for k in range(problem.n_resources)]

    def add(self, task: int) -> None:
        if self._problem.keeps[task] > 0:
            queue = self._opens[self._problem.segment[task]]
        else:
            queue = self._others[self._problem.resource[task]]
        heapq.heappush(queue, (self._keys[task], task))

    def take(self, resource: int, full: bool) -> int | None:
        """The task that a resource runs next; `full` passes the limits of segments."""
        limit, n_kept = self._problem.limit, self._kept
        best: list[tuple[int, int]] = []
        for s in self._segments[resource]:
            queue = self._opens[s]
            if queue and (full or n_kept[s] < limit[s]) and (not best or queue[0] < best[0]):
                best = queue
        others = self._others[resource]
        if others and best:
            last = self._opened_last[resource]
            turn = last if self._alternate else others[0] < best[0]
            best = others if turn else best
        best = best or others
        if not best:
            return None
        task = heapq.heappop(best)[1]
        keeps = self._problem.keeps[task]
        self._opened_last[resource] = keeps > 0
        n_kept[self._problem.segment[task]] += keeps
        return task


def turned(problem: NumberedTasks, order: Sequence[int]) -> list[int]:
    """List scheduling against the order of the mirrored problem: what ends last there is first."""
    starts, _ = starts_of(problem.mirrored, order)
    return listed(problem, [-(start + ticks) for start, ticks in zip(starts, problem.ticks)])


def sequenced(problem: NumberedTasks, keys: Sequence[int]) -> list[int]:
    """The order in which the task of least key comes next, of those that wait for none.

    Where all of these would open a group in a full segment, a limit is passed.
    """
    segment, keeps, limit = problem.segment, problem.keeps, problem.limit
    waits, n_kept = list(problem.n_waits), [0] * len(limit)
    ready = [(keys[t], t) for t in range(problem.n) if not waits[t]]
    heapq.heapify(ready)
    blocked: list[list[tuple[int, int]]] = [[] for _ in limit]
    order: list[int] = []
    while len(order) < problem.n:
        full = not ready
        key, t = heapq.heappop(ready) if ready else min(min(b) for b in blocked if b)
        s = segment[t]
        if full:
            blocked[s].remove((key, t))
        elif keeps[t] > 0 and n_kept[s] >= limit[s]:
            blocked[s].append((key, t))
            continue
        order.append(t)
        n_kept[s] += keeps[t]
        if keeps[t] < 0:
            for task in blocked[s]:
                heapq.heappush(ready, task)
            blocked[s].clear()
        for reader, _, _ in problem.out[t]:
            waits[reader] -= 1
            if not waits[reader]:
                heapq.heappush(ready, (keys[reader], reader))
    return order
