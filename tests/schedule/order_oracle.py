"""The least makespan of a small step, by going through every order of its tasks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dflop_jax.simulate.numbered_tasks import NumberedTasks

# When resources and links are free and when tasks' inputs are there, after some tasks were run.
State = tuple[float, ...]


def least_makespan(
    problem: NumberedTasks, ceiling_s: float = math.inf, most_states: int = 200_000
) -> float | None:
    """Seconds of the fastest order that memory allows; None where there are more than
    `most_states` cases.

    Orders are made task by task. Of two beginnings with the same tasks the one after which nothing
    is free or there later is kept, since every end of the other does at least as well behind it.

    Args:
      ceiling_s: what some order takes; beginnings that cannot end before are given up.
    """
    left_out = _idle_ends(problem)
    tails = _tails(problem)
    ceiling_s *= 1 + 1e-9
    start: State = (0.0,) * (problem.n_resources + problem.n_links + problem.n_tasks)
    layer: dict[int, list[State]] = {0: [start]}  # set of tasks, as bits -> what may follow
    seen = 0
    for _ in range(problem.n_tasks - left_out.bit_count()):
        following: dict[int, list[State]] = {}
        for done, states in layer.items():
            for t in _possible(problem, done | left_out):
                front = following.setdefault(done | 1 << t, [])
                rest = _rest(problem, done | 1 << t)
                for state in states:
                    after = _after(problem, state, t)
                    if _least_end(problem, after, done | 1 << t, rest, tails) <= ceiling_s:
                        _keep(front, after)
        layer = following
        seen += sum(map(len, layer.values()))
        if seen > most_states:
            return None
    final = layer.get((1 << problem.n_tasks) - 1 - left_out)
    ends = [max(state[: problem.n_resources], default=0.0) for state in final or []]
    return min(ends) if ends else None


def _tails(problem: NumberedTasks) -> list[float]:
    """Seconds of the longest path from each task's start to the end."""
    tails: dict[int, float] = {}

    def tail(t: int) -> float:
        if t not in tails:
            after = (send_s + tail(reader) for reader, _, send_s in problem.successors[t])
            tails[t] = problem.ticks[t] + max(after, default=0.0)
        return tails[t]

    return [tail(t) for t in range(problem.n_tasks)]


def _rest(problem: NumberedTasks, done: int) -> list[float]:
    """Seconds that each resource still has to run."""
    rest = [0.0] * problem.n_resources
    for t in range(problem.n_tasks):
        if not done >> t & 1:
            rest[problem.resource[t]] += problem.ticks[t]
    return rest


def _least_end(
    problem: NumberedTasks, state: State, done: int, rest: list[float], tails: list[float]
) -> float:
    """No order that begins so ends earlier."""
    base = problem.n_resources + problem.n_links
    least = max(free + r for free, r in zip(state, rest))
    for t in range(problem.n_tasks):
        if not done >> t & 1:
            free = state[problem.resource[t]]
            least = max(least, max(state[base + t], free) + tails[t])
    return least


def _idle_ends(problem: NumberedTasks) -> int:
    """Tasks, as bits, that take no time and that only such tasks wait for: they may run last."""
    idle = 0
    for t in reversed(range(problem.n_tasks)):
        followed = any(not idle >> reader & 1 for reader, _, _ in problem.successors[t])
        if not problem.ticks[t] and not followed and not problem.live_change[t]:
            idle |= 1 << t
    return idle


def _possible(problem: NumberedTasks, done: int) -> Iterator[int]:
    """Tasks that may run next, after the set `done`."""
    waits = list(problem.n_inputs)
    kept = [0] * len(problem.max_live)
    for t in range(problem.n_tasks):
        if done >> t & 1:
            kept[problem.segment[t]] += problem.live_change[t]
            for reader, _, _ in problem.successors[t]:
                waits[reader] -= 1
    for t in range(problem.n_tasks):
        full = (
            problem.live_change[t] > 0
            and kept[problem.segment[t]] >= problem.max_live[problem.segment[t]]
        )
        if not done >> t & 1 and not waits[t] and not full:
            yield t


def _after(problem: NumberedTasks, state: State, t: int) -> State:
    n_links, base = problem.n_resources, problem.n_resources + problem.n_links
    times = list(state)
    end = max(times[problem.resource[t]], times[base + t]) + problem.ticks[t]
    times[problem.resource[t]], times[base + t] = end, 0.0
    for reader, link, send_s in problem.successors[t]:
        arrives = end
        if link >= 0:
            arrives = times[n_links + link] = max(times[n_links + link], end) + send_s
        times[base + reader] = max(times[base + reader], arrives)
    return tuple(times)


def _keep(front: list[State], state: State) -> None:
    """Add a state to those of which none is better than another."""
    for other in front:
        if all(a <= b for a, b in zip(other, state)):
            return
    front[:] = [o for o in front if not all(b <= a for a, b in zip(o, state))]
    front.append(state)
