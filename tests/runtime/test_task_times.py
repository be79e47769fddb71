"""The seconds that each process computed in a step, from when its tasks began and ended."""

import numpy as np
import pytest

from dflop_jax.records import BACKWARD, FORWARD, REDUCE, Task
from dflop_jax.runtime.step_result import TaskOrder, process_seconds, stack_moments


def seconds(order, parts, resource_of, waits_for):
    seen = stack_moments(parts, len(order))
    return process_seconds(seen, TaskOrder.from_tasks(order, waits_for, resource_of))


# ---- the same by the definitions, process by process and task by task ----


def own_seconds_by_definition(order, parts, resource_of, waits_for):
    last_end = {}
    for part in parts:
        for place, (*_, end) in part.items():
            last_end[order[place]] = max(end, last_end.get(order[place], end))
    for part in parts:
        own_end = {order[place]: end for place, (*_, end) in part.items()}
        took, free_s = {}, {}
        for place, (dispatched, received, computed, end) in part.items():
            task, resource = order[place], resource_of[order[place].segment]
            if resource in free_s and task.direction in (FORWARD, BACKWARD):
                inputs = [own_end.get(t, last_end[t]) for t in waits_for[task]]
                start = max(dispatched, received, free_s[resource], *inputs)
                took[task] = max(computed - start, 0.0)
            free_s[resource] = end
        yield took


@pytest.mark.parametrize("seed", range(12))
def test_many_processes_are_timed_as_one_by_one(seed):
    """Processes that hold some of four segments, two of which share a resource: from none to nine,
    in groups of unequal size; some tasks without a price, some that take no time."""
    rng = np.random.default_rng(seed)
    resource_of = {"a": 0, "b": 1, "c": 1, "d": 2}
    order = [Task(s, g, d) for g in range(3) for s in "abcd" for d in (FORWARD, BACKWARD)]
    order += [Task(s, -1, REDUCE) for s in "abcd"]
    waits_for = {t: [] for t in order}
    for i, task in enumerate(order[1:], 1):
        waits_for[task] = [order[k] for k in {*rng.integers(i, size=rng.integers(4)).tolist()}]
    parts = []
    for _ in range(seed % 10):
        held = {s for s in "abcd" if rng.random() < 0.6}
        mine = [i for i, task in enumerate(order) if task.segment in held]
        moments = np.sort(rng.integers(0, 40, (len(mine), 4)) / 8, axis=1)
        parts.append(dict(zip(mine, map(tuple, moments.tolist()), strict=True)))
    ran = {order[i] for part in parts for i in part}
    waits_for = {t: [d for d in waits_for[t] if d in ran] for t in order}
    expected = own_seconds_by_definition(order, parts, resource_of, waits_for)
    want = {p: sum(took.values()) for p, took in enumerate(expected)}
    assert seconds(order, parts, resource_of, waits_for) == pytest.approx(want, rel=1e-12)
