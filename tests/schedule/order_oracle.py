"""The least makespan of a small step, by going through every order of its tasks."""

from __future__ import annotations

from collections.abc import Iterator

from dflop_jax.simulate.numbered_tasks import StepTasks

# When resources and links are free and when tasks' inputs are there, after some tasks were run.
State = tuple[float, ...]


def least_makespan(problem: StepTasks) -> float:
    """Ticks of the fastest order within the limits of groups in flight, over every order.

    Orders are extended task by task. Of two partial orders of the same tasks, one is dropped if
    nothing is free or arrives earlier after it than after the other.
    """
    left_out = _idle_ends(problem)
    start: State = (0.0,) * (problem.n_resources + problem.n_links + problem.n_tasks)
    layer: dict[int, list[State]] = {0: [start]}  # set of tasks, as bits -> states after it
    for _ in range(problem.n_tasks - left_out.bit_count()):
        following: dict[int, list[State]] = {}
        for done, states in layer.items():
            for t in _possible(problem, done | left_out):
                front = following.setdefault(done | 1 << t, [])
                for state in states:
                    after = _after(problem, state, t)
                    if not any(all(a <= b for a, b in zip(o, after)) for o in front):
                        front[:] = [o for o in front if any(b > a for a, b in zip(o, after))]
                        front.append(after)
        layer = following
    (final,) = layer.values()
    return min(max(state[: problem.n_resources], default=0.0) for state in final)


def _idle_ends(problem: StepTasks) -> int:
    """Tasks, as bits, that take no time and that only such tasks wait for: they may run last."""
    idle = 0
    for t in reversed(range(problem.n_tasks)):
        followed = any(not idle >> reader & 1 for reader, _, _ in problem.successors[t])
        if not problem.ticks[t] and not followed and not problem.live_change[t]:
            idle |= 1 << t
    return idle


def _possible(problem: StepTasks, done: int) -> Iterator[int]:
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


def _after(problem: StepTasks, state: State, t: int) -> State:
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
