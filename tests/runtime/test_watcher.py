"""Start and end of tasks from hand-made observations, and the threads that make them."""

import threading
import time

import pytest

from dflop_jax.records import BACKWARD, FORWARD, Task
from dflop_jax.runtime import step_result
from dflop_jax.runtime.watcher import Observation, Outputs, PendingTasks, Watcher

VISION, LLM = Task("vision", 0, FORWARD), Task("llm", 0, BACKWARD)
BACK = Task("vision", 0, BACKWARD)
SUBMESH = {"vision": "enc", "llm": "dec"}


OTHER = Task("vision", 1, FORWARD)
LATE = Task("llm", 1, FORWARD)
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
    tasks = [task for task, *_ in observed]
    waits_for = {VISION: (), LLM: (VISION,), BACK: (LLM, VISION), OTHER: (), LATE: ()}
    order = step_result.TaskOrder.from_tasks(tasks, waits_for, resource_of)
    dispatched_s, end_s = ([seen[i] for seen in observed] for i in (1, 2))
    free_s = dict(free_s)
    found = step_result.to_events(order, dispatched_s, end_s, SUBMESH, free_s)
    assert found[0] == origin
    events = [(e.submesh, e.segment, e.direction, e.start_s, e.end_s) for e in found[1]]
    wanted = zip(tasks, spans, strict=True)
    assert events == [(SUBMESH[t.segment], t.segment, t.direction, *span) for t, span in wanted]
    assert free_s == free_after_s


class Output:
    """Becomes ready when told, or fails."""

    def __init__(self, fails: bool = False):
        self.ready, self.fails = threading.Event(), fails

    def block_until_ready(self):
        assert self.ready.wait(30)
        if self.fails:
            raise RuntimeError("the device is gone")
        return self


def test_resources_are_watched_apart_and_each_in_order():
    watcher = Watcher({0, 1})
    try:
        slow, fast = Output(), Output()
        a = watcher.watch(0, 1.0, Outputs((), slow, ()))
        b = watcher.watch(1, 2.0, Outputs((), fast, ()))
        fast.ready.set()
        b.wait()
        assert not a.done.is_set()
        slow.ready.set()
        a.wait()
        assert a.moments[-1] >= b.moments[-1] > 0
        assert (a.moments[0], b.moments[0]) == (1.0, 2.0)
    finally:
        watcher.close()


def test_an_exchange_is_told_from_what_a_task_computes():
    watcher = Watcher({0})
    try:
        outputs = Outputs(Output(), Output(), Output())
        seen = watcher.watch(0, 0.5, outputs)
        for i, one in enumerate(outputs):
            assert all(s > 0 for s in seen.moments[1 : 1 + i])
            assert not any(seen.moments[1 + i :])
            one.ready.set()
            while not seen.moments[1 + i]:
                time.sleep(1e-3)
        seen.wait()
        dispatched_s, *ends_s = seen.moments
        assert dispatched_s == 0.5
        assert ends_s == sorted(ends_s)
    finally:
        watcher.close()


def test_an_error_reaches_whoever_waits_and_does_not_end_the_thread():
    watcher = Watcher({0})
    try:
        outputs = [Output(fails=True), Output()]
        failed, fine = (watcher.watch(0, 0.0, Outputs((), o, ())) for o in outputs)
        for o in outputs:
            o.ready.set()
        with pytest.raises(RuntimeError, match="the device is gone"):
            failed.wait()
        fine.wait()
    finally:
        watcher.close()
    assert not any(t.name == "watcher-0" and t.is_alive() for t in watcher._threads)


def test_how_far_tasks_are_is_told_by_what_has_ended():
    tasks, watcher = PendingTasks(), Watcher({0})
    assert tasks.progress() == (0, 0, 0, ())
    seen: dict[int, Observation] = {}
    tasks.dispatch((VISION, LLM, BACK), seen)
    assert tasks.progress() == (1, 0, 0, ())
    for i, task in enumerate((VISION, LLM)):
        tasks.start_task(i)
        if task is VISION:  # the other is another process's
            seen[i] = watcher.watch(0, 0.0, Outputs((), (), ()))
    seen[0].done.wait()
    ended = "ended: forward of vision, group 0 (task 1 of 3)"
    assert tasks.progress() == (1, 2, 2, (ended, "ended: backward of llm, group 0 (task 2 of 3)"))
    tasks.start_task(2)
    seen[2] = Observation(0.0)
    *_, lines = tasks.progress()
    assert lines[-1] == "begun, not ended: backward of vision, group 0 (task 3 of 3)"
    # The next step is dispatched, but this one is waited for.
    tasks.dispatch((VISION,), {})
    tasks.start_task(0)
    assert tasks.progress()[:3] == (1, 2, 3)
    seen[2].done.set()
    assert tasks.progress()[:3] == (2, 1, 1)
    watcher.close()
