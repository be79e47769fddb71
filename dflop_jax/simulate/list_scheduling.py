"""Orders of tasks from keys, within the limits of groups in flight.

A list schedule runs, on every free resource, the ready task with the lowest key. A serial schedule
appends, of all tasks whose inputs have run, the one with the lowest key; its resource may have to
wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from dflop_jax.simulate.numbered_tasks import StepTasks, start_ticks


def list_schedule(problem: StepTasks, keys: Sequence[int], *, alternate: bool = False) -> list[int]:
    """The order in which tasks start.

    If nothing runs and every segment with a ready task is at its limit, one limit is exceeded.

    Args:
      alternate: forward and backward tasks queue separately, and a resource with both takes the
        direction that it did not take last (dual-queue rule).
    """
    ticks, resource, successors = problem.ticks, problem.resource, problem.successors
    queues = _Queues(problem, keys, alternate)
    n_pending, ready_ticks = list(problem.n_inputs), [0] * problem.n_tasks
    link_free = [0] * problem.n_links
    idle = [True] * problem.n_resources
    order: list[int] = []
    # Events: a task's inputs have arrived, or a resource's task ends (-1 - resource).
    events = [(0, t) for t in range(problem.n_tasks) if not n_pending[t]]
    now_ticks = 0
    while len(order) < problem.n_tasks:
        full = not events
        touched = set(range(problem.n_resources)) if full else set()
        if events:
            now_ticks = events[0][0]
        while events and events[0][0] <= now_ticks:
            code = heapq.heappop(events)[1]
            if code < 0:
                idle[-1 - code] = True
                touched.add(-1 - code)
            else:
                queues.add(code)
                touched.add(resource[code])
        for r in sorted(touched):
            if not idle[r] or (t := queues.pop_next(r, full)) is None:
                continue
            order.append(t)
            idle[r], full = False, False
            end = now_ticks + ticks[t]
            heapq.heappush(events, (end, -1 - r))
            for reader, link, send in successors[t]:
                arrives = end
                if link >= 0:
                    if link_free[link] > end:
                        arrives = link_free[link]
                    link_free[link] = arrives = arrives + send
                if arrives > ready_ticks[reader]:
                    ready_ticks[reader] = arrives
                n_pending[reader] -= 1
                if not n_pending[reader]:
                    heapq.heappush(events, (ready_ticks[reader], reader))
    return order


class _Queues:
    """Ready tasks: per segment those that open a group, per resource all others."""

    def __init__(self, problem: StepTasks, keys: Sequence[int], alternate: bool):
        self._problem, self._keys, self._alternate = problem, keys, alternate
        self._in_flight = [0] * len(problem.max_live)
        self._opens: list[list[tuple[int, int]]] = [[] for _ in problem.max_live]
        self._others: list[list[tuple[int, int]]] = [[] for _ in range(problem.n_resources)]
        self._opened_last = [False] * problem.n_resources
        used = dict.fromkeys(
            (problem.resource[t], problem.segment[t])
            for t in range(problem.n_tasks)
            if problem.live_change[t] > 0
        )
        self._segments = [[s for r, s in used if r == k] for k in range(problem.n_resources)]

    def add(self, task: int) -> None:
        if self._problem.live_change[task] > 0:
            queue = self._opens[self._problem.segment[task]]
        else:
            queue = self._others[self._problem.resource[task]]
        heapq.heappush(queue, (self._keys[task], task))

    def pop_next(self, resource: int, full: bool) -> int | None:
        """The task that a resource runs next; `full` ignores the limits of segments."""
        max_live, in_flight = self._problem.max_live, self._in_flight
        best_queue: list[tuple[int, int]] = []
        for s in self._segments[resource]:
            queue = self._opens[s]
            if (
                queue
                and (full or in_flight[s] < max_live[s])
                and (not best_queue or queue[0] < best_queue[0])
            ):
                best_queue = queue
        other_queue = self._others[resource]
        if other_queue and best_queue:
            opened_last = self._opened_last[resource]
            take_other = opened_last if self._alternate else other_queue[0] < best_queue[0]
            best_queue = other_queue if take_other else best_queue
        best_queue = best_queue or other_queue
        if not best_queue:
            return None
        task = heapq.heappop(best_queue)[1]
        live_change = self._problem.live_change[task]
        self._opened_last[resource] = live_change > 0
        in_flight[self._problem.segment[task]] += live_change
        return task


def backward_list_schedule(problem: StepTasks, order: Sequence[int]) -> list[int]:
    """A list schedule with the order of the mirrored problem reversed: the task that ends last
    there comes first."""
    starts, _ = start_ticks(problem.mirrored, order)
    return list_schedule(problem, [-(start + ticks) for start, ticks in zip(starts, problem.ticks)])


def serial_schedule(problem: StepTasks, keys: Sequence[int]) -> list[int]:
    """The order that always appends the ready task with the lowest key.

    If all ready tasks would exceed a limit of groups in flight, one limit is exceeded.
    """
    segment, max_live = problem.segment, problem.max_live
    live_change = problem.live_change
    n_pending, in_flight = list(problem.n_inputs), [0] * len(max_live)
    ready_tasks = [(keys[t], t) for t in range(problem.n_tasks) if not n_pending[t]]
    heapq.heapify(ready_tasks)
    blocked: list[list[tuple[int, int]]] = [[] for _ in max_live]
    order: list[int] = []
    while len(order) < problem.n_tasks:
        full = not ready_tasks
        key, t = heapq.heappop(ready_tasks) if ready_tasks else min(min(b) for b in blocked if b)
        s = segment[t]
        if full:
            blocked[s].remove((key, t))
        elif live_change[t] > 0 and in_flight[s] >= max_live[s]:
            blocked[s].append((key, t))
            continue
        order.append(t)
        in_flight[s] += live_change[t]
        if live_change[t] < 0:
            for task in blocked[s]:
                heapq.heappush(ready_tasks, task)
            blocked[s].clear()
        for reader, _, _ in problem.successors[t]:
            n_pending[reader] -= 1
            if not n_pending[reader]:
                heapq.heappush(ready_tasks, (keys[reader], reader))
    return order
