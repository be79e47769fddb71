"""When tasks ran, from hand-made observations; the threads that observe; and a step's progress."""

import threading
import time

import numpy as np
import pytest

from dflop_jax.records import BACKWARD, FORWARD, REDUCE, Task
from dflop_jax.runtime.step import Outputs
from dflop_jax.runtime.step_result import (
    Observation,
    PendingTasks,
    Watcher,
    process_seconds,
    stack_moments,
    to_events,
)

VISION, BACK = (Task("vision", 0, direction) for direction in (FORWARD, BACKWARD))
LLM = Task("llm", 0, BACKWARD)
OTHER, LATE = Task("vision", 1, FORWARD), Task("llm", 1, FORWARD)
SUBMESH = {"vision": "enc", "llm": "dec"}
APART, SHARED = {"vision": 0, "llm": 1}, {"vision": 0, "llm": 0}
# (tasks as (task, dispatched, ended), resources, when these were free before) -> (origin, (start,
# end) of each task after it, when resources are free then)
EVENTS = {
    "a task starts when its inputs are made": (
        [(VISION, 10.0, 12.0), (LLM, 10.1, 15.0), (BACK, 10.2, 16.0)], APART, {},
        10.0, [(0.0, 2.0), (2.0, 5.0), (5.0, 6.0)], {0: 16.0, 1: 15.0},
    ),
    "or when its resource is free": (  # the step before held the devices until 2.5
        [(VISION, 1.0, 4.0), (OTHER, 1.5, 6.0)], APART, {0: 2.5},
        2.5, [(0.0, 1.5), (1.5, 3.5)], {0: 6.0},
    ),
    "or when it is dispatched": (
        [(VISION, 1.0, 2.0), (LLM, 5.0, 6.0)], APART, {}, 1.0, [(0.0, 1.0), (4.0, 5.0)],
        {0: 2.0, 1: 6.0},
    ),
    "submeshes that share devices never overlap": (
        [(VISION, 0.0, 3.0), (LATE, 0.0, 4.0)], SHARED, {}, 0.0, [(0.0, 3.0), (3.0, 4.0)], {0: 4.0},
    ),
    "an end that is seen late gives no negative duration": (
        [(VISION, 0.0, 2.0), (LLM, 0.0, 1.9)], APART, {}, 0.0, [(0.0, 2.0), (1.9, 1.9)],
        {0: 2.0, 1: 1.9},
    ),
    "nothing was observed": ([], APART, {}, 0.0, [], {}),
}  # fmt: skip


@pytest.mark.parametrize("case", EVENTS.values(), ids=EVENTS)
def test_start_and_end_of_tasks_follow_from_what_was_observed(case):
    observed, resource_of, free_s, origin, spans, free_after_s = case
    waits_for = {VISION: (), LLM: (VISION,), BACK: (LLM, VISION), OTHER: (), LATE: ()}
    moments, free_s = {t: (start, 0.0, 0.0, end) for t, start, end in observed}, dict(free_s)
    found = to_events(moments, waits_for, resource_of, SUBMESH, free_s)
    assert found[0] == origin
    events = [(e.submesh, e.segment, e.direction, e.start_s, e.end_s) for e in found[1]]
    wanted = zip(moments, spans, strict=True)
    assert events == [(SUBMESH[t.segment], t.segment, t.direction, *span) for t, span in wanted]
    assert free_s == free_after_s


def own_seconds_by_definition(order, parts, resource_of, waits_for):
    """Process by process and task by task."""
    last_end = {}
    for part in parts:
        for i, (*_, end) in part.items():
            last_end[order[i]] = max(end, last_end.get(order[i], end))
    for part in parts:
        own_end = {order[i]: end for i, (*_, end) in part.items()}
        total, free_s = 0.0, {}
        for i, (dispatched, received, computed, end) in part.items():
            task, resource = order[i], resource_of[order[i].segment]
            if resource in free_s and task.direction in (FORWARD, BACKWARD):
                inputs = [own_end.get(t, last_end[t]) for t in waits_for[task]]
                start = max(dispatched, received, free_s[resource], *inputs)
                total += max(computed - start, 0.0)
            free_s[resource] = end
        yield total


@pytest.mark.parametrize("seed", range(12))
def test_many_processes_are_timed_as_one_by_one(seed):
    """Of none to nine processes with some of four segments, two of which share a resource."""
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
    want = dict(enumerate(own_seconds_by_definition(order, parts, resource_of, waits_for)))
    found = process_seconds(stack_moments(parts, len(order)), order, waits_for, resource_of)
    assert found == pytest.approx(want, rel=1e-12)


class Output:
    """Becomes ready when told, or fails."""

    def __init__(self, fails: bool = False):
        self.ready, self.fails = threading.Event(), fails

    def block_until_ready(self):
        assert self.ready.wait(30)
        if self.fails:
            raise RuntimeError("the device is gone")
        return self


@pytest.fixture
def watcher():
    made = Watcher({0, 1})
    yield made
    made.close()
    assert not any(t.is_alive() for t in made._threads)


def test_resources_are_watched_apart_and_an_error_reaches_whoever_waits(watcher):
    slow, fast, failing = Output(), Output(), Output(fails=True)
    a = watcher.watch(0, 1.0, Outputs((), slow, ()))
    failed = watcher.watch(1, 1.5, Outputs((), failing, ()))
    b = watcher.watch(1, 2.0, Outputs((), fast, ()))
    failing.ready.set()
    fast.ready.set()
    with pytest.raises(RuntimeError, match="the device is gone"):
        failed.wait()
    b.wait()
    assert not a.done.is_set()
    slow.ready.set()
    a.wait()
    assert a.moments[-1] >= b.moments[-1] > 0
    assert (a.moments[0], b.moments[0]) == (1.0, 2.0)


def test_an_exchange_is_told_from_what_a_task_computes(watcher):
    outputs = Outputs(Output(), Output(), Output())
    seen = watcher.watch(0, 0.5, outputs)
    for i, one in enumerate(outputs):
        assert all(s > 0 for s in seen.moments[1 : 1 + i])
        assert not any(seen.moments[1 + i :])
        one.ready.set()
        while not seen.moments[1 + i]:
            time.sleep(1e-3)
    seen.wait()
    assert seen.moments == [0.5, *sorted(seen.moments[1:])]


def test_progress_is_told_by_what_has_ended():
    tasks = PendingTasks()
    assert tasks.progress() == (0, 0, 0, ())
    seen = {0: Observation(0.0)}
    tasks.dispatch((VISION, LLM, BACK), seen)
    assert tasks.progress() == (1, 0, 0, ())
    tasks.n_started = 2  # the second one is another process's
    seen[0].done.set()
    assert tasks.progress() == (1, 2, 2, ("ended: backward of llm, group 0 (task 2 of 3)",))
    tasks.n_started, seen[2] = 3, Observation(0.0)
    pending = "begun, not ended: backward of vision, group 0 (task 3 of 3)"
    assert tasks.progress()[3][-1] == pending
    # The next step is dispatched, but this one is waited for.
    tasks.dispatch((VISION,), {})
    tasks.n_started = 1
    assert tasks.progress()[:3] == (1, 2, 3)
    seen[2].done.set()
    assert tasks.progress()[:3] == (2, 1, 1)
